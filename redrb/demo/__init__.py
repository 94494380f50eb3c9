"""`redrb demo`: runs a server, makers and a trainer on this machine, and shows their progress."""
