"""From samples to entries of a task's stream: checked, filtered, encoded, stored exactly once."""
