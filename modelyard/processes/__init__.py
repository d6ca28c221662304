"""Child processes: started so that none is orphaned, watched, restarted and stopped."""
