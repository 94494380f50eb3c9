"""First recipes that `redrb new` writes; each runs unchanged: `redrb run FILE`."""
