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
-- Returns {'taken', entries, {member ...}, {weight ..., sum of weights}}: of an order
--         other than fifo the members in this order, of one that draws their weights and the weight of all
--         groups that waited
--       | {'short', waiting, producers that wait for room, groups that just expired, groups that wait
--         with another status}
--       | {'never', limit}: the limit is smaller than the batch
--       | {'gone'}: there is no such task | {'late'}: a later take of the slot came first
--       | {'ranks'}: ranks take from this consumer group, so other consumers may not
--       | {'more', groups that just expired}: run it again, there is more to do before
--@include task facts pools history capacity waiters waking leases ranks staleness claims membership ledger
--@include where

begin_writing()
local rule = rules()
if not rule.exists then
  return {'gone'}
end
local group, consumer, slot, token = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local count, least, waiter = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local ttl_ms, status, where, now = tonumber(ARGV[8]), ARGV[10], ARGV[11], now_ms()
local state, pool = key('group', group), pool_of(group, status)
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
if keeps() then
  trim_history(100)
end
local expired, more = expire_overdue(group, status)
if taken_over + expired > 0 then
  wake_room(now)
end
if returned + taken_over + expired > 0 then
  wake_returned(group, now)
end
if more then
  return {'more', expired}
end
local most = rule.limit > 0 and rule.limit or rule.capacity
if most > 0 and least > most then
  return {'never', most}
end

-- how many groups this take may have: groups are reserved for takes before it in the queue
local here, free, chosen
local queue = queue_of(pool, where)
if where ~= '' then
  chosen = select_where(pool, rule.names, cjson.decode(where), count)
  here, free = #chosen, math.min(#chosen, reads_left(group))
else
  here = redis.call('ZCARD', key('ready', pool))
  free = math.min(here, reads_left(group))
end
local awaited = redis.call('EXISTS', key('queue', queue)) == 1
if awaited and where == '' then
  free = free - reserved_before(queue, waiter, now, free)
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
    elseif ttl_ms > 0 then
      enqueue_query(pool, where, here)
    else
      leave_query(pool, where, 0)
    end
    local others = waiting_in_all_pools(group) - here
    return {'short', here, redis.call('ZCARD', key('queue', '#room')), expired, others}
  end
  count = free
end

local lease = {group = group, pool = pool, slot = slot, claimed = 0, lost = 0, members = {}, weights = {}}
local total = rule.sampled and redis.call('HGET', key('mass', group), pool) or '0'
if chosen then
  for first = 1, count, 1000 do
    claim_members(lease, {unpack(chosen, first, math.min(first + 999, count))})
  end
else
  local next_members
  repeat
    next_members = redis.call('ZRANGE', key('ready', pool), 0, math.min(count - lease.claimed, 1000) - 1)
    claim_members(lease, next_members)
  until #next_members == 0 or lease.claimed == count
end
redis.call('HSET', key('leases', group), slot, token)
add(state, 'evicted', lease.lost) -- entries that another client deleted
add(state, 'taken', lease.claimed)
if rate_of() then
  wake_room(now)
end
if awaited then
  dequeue(queue, waiter)
  if where == '' then
    wake_pool(pool, now)
  else
    leave_query(pool, where, lease.claimed)
  end
end
if #lease.weights > 0 then
  lease.weights[#lease.weights + 1] = total
end
return {'taken', lease.claimed, rule.order ~= 'fifo' and lease.members or {}, lease.weights}
