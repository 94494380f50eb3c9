"""`redrb demo`: a server, two makers and a trainer on this machine, watched until they are done."""
