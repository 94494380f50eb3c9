"""What a task is and holds: settings, ledger, tags, staleness, history, dead letters."""
