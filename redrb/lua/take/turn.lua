-- Give one take of a consumer group at a time its turn to wait for groups of all partitions, first come first
-- served. A task without partitions has no turns.
-- KEYS[1] stream of the first partition
-- ARGV    group, caller, turn_ms, queue_ms
--         turn_ms: how long the turn lasts unless the caller asks again; 0: end it, leave the queue
--         queue_ms: how long the caller keeps its place in the queue
-- Returns 'turn' | 'wait': another take has it | 'ended'
--         turn:<group> holds "<caller> <deadline>". A request that arrives after its take has ended may give
--         the turn to it, until the deadline.
--@include task clock waiters permissions

local turn_ms, queue_ms = tonumber(ARGV[3]), tonumber(ARGV[4])
local caller, turn, queue = ARGV[2], key('turn', ARGV[1]), '#turn:' .. ARGV[1]
local holder, deadline = string.match(redis.call('GET', turn) or '', '^(%S+) (%d+)$')
check_permissions(KEYS[1])
if turn_ms == 0 then
  dequeue(queue, caller)
  if holder == caller then
    redis.call('DEL', turn)
    wake(queue, 1, now_ms())
  end
  return 'ended'
elseif not exists() then -- the take finds out when it looks for groups
  return 'turn'
end
begin_writing()
local now = set_clock()
local others = holder and holder ~= caller and tonumber(deadline) > now
if others or holder ~= caller and reserved_before(queue, caller, now, 0) > 0 then
  enqueue(queue, caller, 1, queue_ms, now)
  return 'wait'
end
dequeue(queue, caller)
redis.call('SET', turn, string.format('%s %.0f', caller, now + turn_ms))
return 'turn'
