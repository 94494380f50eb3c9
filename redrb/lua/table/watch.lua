-- Say how far the table's changes are, and queue where there is none after a change.
-- KEYS[1] stream
-- ARGV    the call `Watch` of redrb/table/calls.py
-- Returns the newest change
--@include task clock waiters

local ask = cmsgpack.unpack(ARGV[1])
begin_writing()
local change = number(task, 'change')
if change == ask.after and ask.ttl_ms > 0 then
  enqueue('#watch', ask.waiter, 0, ask.ttl_ms, now_ms())
else
  dequeue('#watch', ask.waiter)
end
return cmsgpack.pack(change)
