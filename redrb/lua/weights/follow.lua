-- Register a task as a follower of these weights: its newest version advances with theirs.
-- KEYS[1] versions
-- ARGV    the call `Follow` of redrb/stream/task/task.py
-- Returns its reply
--@include weights

begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
redis.call('SADD', prefix .. 'followers', ask.stream)
local last = newest()
return cmsgpack.pack(last and last.version or 0)
