"""Use the operating system: allocate memory, start threads, measure processor time, save calibrations."""
