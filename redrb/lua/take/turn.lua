-- Give one take of a consumer group at a time its turn to wait for groups of all partitions, first come first
-- served. A task without partitions has no turns.
-- KEYS[1] stream of the first partition
-- ARGV    the call `AskTurn` of redrb/stream/partitions/turn.py
-- Returns its reply
--         turn:<group> holds "<caller> <deadline>". A request that arrives after its take has ended may give
--         the turn to it, until the deadline.
--@include task clock waiters permissions

local ask = cmsgpack.unpack(ARGV[1])
local caller, turn, queue = ask.caller, key('turn', ask.group), '#turn:' .. ask.group
local holder, deadline = string.match(redis.call('GET', turn) or '', '^(%S+) (%d+)$')
check_permissions(KEYS[1])
if ask.turn_ms == 0 then
  dequeue(queue, caller)
  if holder == caller then
    redis.call('DEL', turn)
    wake(queue, 1, now_ms())
  end
  return cmsgpack.pack('ended')
elseif not exists() then -- the take finds out when it looks for groups
  return cmsgpack.pack('turn')
end
begin_writing()
local now = set_clock()
local others = holder and holder ~= caller and tonumber(deadline) > now
if others or holder ~= caller and reserved_before(queue, caller, now, 0) > 0 then
  enqueue(queue, caller, 1, ask.queue_ms, now)
  return cmsgpack.pack('wait')
end
dequeue(queue, caller)
redis.call('SET', turn, string.format('%s %.0f', caller, now + ask.turn_ms))
return cmsgpack.pack('turn')
