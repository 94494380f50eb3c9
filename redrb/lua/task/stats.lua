-- Read the counters of a task and of one consumer group, consistently. Writes nothing.
-- KEYS[1] stream
-- ARGV    group
-- Returns a flat list name, number, ...: include/figures.lua; {} if there is no task
--@include task figures

if not exists() then
  return {}
end
return figures_of(ARGV[1])
