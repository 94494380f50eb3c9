"""One task in several partitions on the nodes of a cluster: `ExperienceStream(partitions=8)`."""
