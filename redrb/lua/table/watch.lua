-- Say how far the table's changes are, and queue where there is none after a change.
-- KEYS[1] stream
-- ARGV    the call `Watch` of redrb/table/calls.py
-- Returns the newest change; -1 where the table is gone, and nothing is written
--@include task clock waiters

local ask = cmsgpack.unpack(ARGV[1])
if redis.call('HGET', task, 'incarnation') ~= ask.incarnation then
  return cmsgpack.pack(-1)
end
begin_writing()
local change = number(task, 'change')
if change == ask.after and ask.ttl_ms > 0 then
  enqueue('#watch', ask.waiter, 0, ask.ttl_ms, now_ms())
else
  dequeue('#watch', ask.waiter)
end
return cmsgpack.pack(change)
