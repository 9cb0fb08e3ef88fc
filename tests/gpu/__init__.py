"""What only hardware shows: races, overlap, faults, the driver's own locks. Skipped by capability."""
