"""Records of what must not change when code moves: schedules, waits, footprints, results of products."""
