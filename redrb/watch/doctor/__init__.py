"""`redrb doctor`: looks for troubles that a state does not show, and mends what is safe to mend.

One file a subject. Each says the kinds of findings that it has, and finds them in a few requests.
"""
