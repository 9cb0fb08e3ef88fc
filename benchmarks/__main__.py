from benchmarks.run_all import main

if __name__ == "__main__":
    main()
