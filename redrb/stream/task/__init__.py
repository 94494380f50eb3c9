"""What a task is and holds: settings, ledger, tags, staleness, dead letters."""
