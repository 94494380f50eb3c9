-- Lease a full batch, or lease nothing and queue for it. Payload is then read with
-- XREADGROUP GROUP group slot STREAMS stream 0.
-- KEYS[1] stream
-- ARGV    group, consumer, slot, token, count, least, waiter, ttl_ms, lease_ms, status, where
--         token: name of the lease, a number that counts up in its slot; repeated with the same token, a
--         take returns the batch that it leased
--         least: fewest entries that are accepted instead of `count`
--         waiter: name in the queue; ttl_ms: how long its place is kept, 0: do not queue, leave the queue
--         lease_ms: the consumer is dead after so long without a heartbeat
--         where: JSON of a query, or ''
-- Returns {'taken', entries, {member ...}, {weight ..., sum of weights}}: of an indexed task the members in
--         the task's order, of an order that draws their weights and the weight of all groups that waited
--       | {'short', waiting, producers that wait for room, groups that just expired, groups that wait
--         with another status}
--       | {'never', limit}: the limit is smaller than the batch
--       | {'gone'}: there is no such task | {'late'}: a later take of the slot came first
--       | {'ranks'}: ranks take from this consumer group, so other consumers may not
--       | {'more', groups that just expired}: run it again, there is more to do before
--@include task facts pools history capacity waiters groups leases ranks staleness claims membership where

begin_writing()
local known, gone = numbers(task, 'last', 'limit', 'capacity')
if gone then
  return {'gone'}
end
local last, limit = known[1], known[2]
local group, consumer, slot, token = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local count, least, waiter = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local ttl_ms, status, where, now = tonumber(ARGV[8]), ARGV[10], ARGV[11], now_ms()
local state, pool, indexed = key('group', group), pool_of(group, status), rules().indexed
local leased = redis.call('HGET', key('leases', group), slot)
if leased == token then
  return taken_before(group, pool, redis.call('XPENDING', stream, group, '-', '+', count, slot))
elseif leased and tonumber(string.match(leased, '^%d+')) >= tonumber(token) then
  return {'late'}
end
if not join(group) then
  return {'more', 0}
end
if has_ranks(group, slot, now) then
  return {'ranks'}
end
local taken_over = beat(group, consumer, tonumber(ARGV[9]), now)
-- requeue a batch that an earlier take leased and whose reply was lost
local returned = 0
if leased and not string.find(leased, ' ended', 1, true) then
  returned = return_slot(group, slot, false, consumer)
end
local expired, more = 0, false
if indexed then
  trim_history(100)
  expired, more = expire_overdue(group, status)
end
if taken_over + expired > 0 then
  wake('#room', room_left(), now)
end
if returned + taken_over > 0 and indexed then
  wake_pools(group, now)
end
if expired > 0 and rules().keep then
  wake_pool(pool_of(group, 'expired'), now)
end
if more then
  return {'more', expired}
end
local counters = numbers(state, 'cursor', 'waiting')
local cursor, waiting = counters[1], counters[2]
local most = limit > 0 and limit or known[3]
if most > 0 and least > most then
  return {'never', most}
end

-- how many groups this take may have: groups are reserved for takes before it in the queue
local here, free, chosen
local queue = pool
if where ~= '' then
  queue = pool .. '?'
  chosen = select_where(pool, rules().names, cjson.decode(where), count)
  here, free = #chosen, math.min(#chosen, reads_left(group))
else
  if indexed then
    here = redis.call('ZCARD', key('ready', pool))
    free = math.min(here, reads_left(group))
  else
    here = status == 'completed' and waiting or 0
    free = here
  end
  if redis.call('EXISTS', key('queue', queue)) == 1 then
    free = free - reserved_before(queue, waiter, now)
  end
end
if free < count then
  if free < least then
    if ttl_ms > 0 then
      enqueue(queue, waiter, count, ttl_ms, now)
    else
      dequeue(queue, waiter)
    end
    if where == '' then
      wake_pool(pool, now)
    end
    local others = indexed and waiting - here or 0
    return {'short', here, redis.call('ZCARD', key('queue', '#room')), expired, others}
  end
  count = free
end

local lease = {group = group, pool = pool, slot = slot, claimed = 0, lost = 0, members = {}, weights = {}}
local total = rules().sampled and redis.call('HGET', key('mass', group), pool) or '0'
if chosen then
  for first = 1, count, 1000 do
    claim_members(lease, {unpack(chosen, first, math.min(first + 999, count))})
  end
else
  local next_members -- in a plain task: requeued entries come first, they are older
  repeat
    next_members = redis.call('ZRANGE', key('ready', pool), 0, math.min(count - lease.claimed, 1000) - 1)
    claim_members(lease, next_members)
  until #next_members == 0 or lease.claimed == count
  while lease.claimed < count and cursor < last do -- of a plain task; undone puts left gaps
    local upto = math.min(cursor + math.min(count - lease.claimed, 1000), last)
    local ids = {}
    for seq = cursor + 1, upto do
      ids[seq - cursor] = id_of(seq)
    end
    claim(lease, ids)
    cursor = upto
  end
  if lease.claimed < count and not indexed then
    lease.lost = waiting - lease.claimed
  end
end
redis.call('HSET', state, 'cursor', string.format('%.0f', cursor),
  'waiting', string.format('%.0f', waiting - lease.claimed - lease.lost))
redis.call('HSET', key('leases', group), slot, token)
-- entries that another client deleted
add(state, 'evicted', lease.lost)
if indexed then
  add(state, 'taken', lease.claimed)
  if redis.call('HEXISTS', task, 'rate') == 1 then
    wake('#room', room_left(), now)
  end
end
if redis.call('EXISTS', key('queue', queue)) == 1 then
  dequeue(queue, waiter)
  if where == '' then
    wake_pool(pool, now)
  end
end
if #lease.weights > 0 then
  lease.weights[#lease.weights + 1] = total
end
return {'taken', lease.claimed, indexed and lease.members or {}, lease.weights}
