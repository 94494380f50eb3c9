-- Note that a task wants to be told of new versions.
-- KEYS[1] versions
-- ARGV    stream of the task
-- Returns the newest version, or 0.
--@include weights

begin_writing()
redis.call('SADD', prefix .. 'followers', ARGV[1])
local last = newest()
return last and last.version or 0
