-- Register a task as a follower of these weights: its newest version advances with theirs.
-- KEYS[1] versions
-- ARGV    stream of the task
-- Returns the newest version, or 0.
--@include weights

begin_writing()
redis.call('SADD', prefix .. 'followers', ARGV[1])
local last = newest()
return last and last.version or 0
