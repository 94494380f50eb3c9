"""The processes of a job: `redrb-maker`, `redrb-trainer` and `redrb-stage`."""
