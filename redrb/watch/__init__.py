"""What people see of a running job: its state, groups, metrics, troubles and the live page."""
