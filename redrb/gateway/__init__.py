"""The gateway: agents that speak OpenAI's or Anthropic's protocol become makers of a task."""
