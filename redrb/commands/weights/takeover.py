"""The sentence that `put` and `rm` say about a trainer that publishes under the same name."""

TAKEOVER = (
    "A trainer that still publishes under this name is fenced: its next publish raises "
    "PublisherFenced."
)
