-- Lease a full batch, or lease nothing and queue. Payload is then read: XREADGROUP GROUP group slot
-- KEYS[1] stream
-- ARGV    group, consumer, slot, token, count, least, waiter, ttl_ms, lease_ms, status, where, revision,
--         report (1 for others and fates)
--         token: name of the lease, a number that counts up in its slot; repeated with the same token, a
--         take returns the batch that it leased; least: fewest entries that are accepted, not `count`
--         waiter: name in the queue; ttl_ms: how long its place is kept, 0: do not queue, leave the queue
--         lease_ms: the consumer is dead after so long without a heartbeat
--         where: JSON of a query, or ''; revision: of the settings that the client knows
-- Returns {'taken', entries, {member ...}, {weight ..., sum of weights}, groups left}: the members in
--         the task's order if it is not that of their ids, of an order that draws their weights and that of
--         all groups that waited, with a query 'nan'; no groups left are named if the take is repeated
--       | {'short', waiting, producers that wait for room, groups that just expired, others, fates}: groups
--         that wait with another status, and the fates of all as in include/fates.lua, if it is to report
--       | {'never', most}: limit, capacity or rate let at most so many groups be taken together
--       | {'gone'}: there is no such task, or its settings are others
--       | {'late'}: a later take of the slot came first, the lease was lost, or ranks need the batch no more
--       | {'ranks'}: ranks take from this consumer group, so other consumers may not
--       | {'more', groups that just expired}: run it again, there is more to do before
--@include task clock facts pools heartbeats claims
--@before take/finish take/recheck

begin_writing()
local rule = rules()
local group, consumer, slot, token = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local count, least, waiter = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local ttl_ms, lease_ms, status, where = tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10], ARGV[11]
local known = rule.exists and rule.revision == ARGV[12]
if not known and (not rule.exists or redis.call('SISMEMBER', key('groups'), group) == 0) then
  return {'gone'}
end
local leased = redis.call('HGET', key('leases', group), slot)
if not leased then -- XREADGROUP creates a consumer of this name: note it, so that it is deleted some day
  --@include permissions
  check_permissions(stream)
  redis.call('ZADD', key('slots', group), 0, slot)
  redis.call('HSET', key('leases', group), slot, '0 ended')
end
if not known then -- XREADGROUP follows all the same; its consumer is deleted when the deadline is over
  renew(group, consumer, lease_ms, set_clock(lease_ms, rule.clock))
  return {'gone'}
elseif leased == token then
  --@include staleness
  local held = redis.call('XPENDING', stream, group, '-', '+', count, slot)
  return taken_before(pool_of(group, status), held, where)
elseif leased and tonumber(string.match(leased, '^%d+')) >= tonumber(token) then
  return {'late'}
end
local pool, now = pool_of(group, status), set_clock(lease_ms, rule.clock)
if redis.call('SISMEMBER', key('groups'), group) == 0 or redis.call('EXISTS', key('joining', group)) == 1 then
  --@include membership
  if not join(group) then
    return {'more', 0}
  end
end
if redis.call('EXISTS', key('ranks', group)) == 1 or string.sub(slot, 1, 6) == 'ranks/' then
  --@include ranks
  local refused = refused_by_ranks(group, slot, token, leased, now)
  if refused then
    return refused
  end
end

-- before: leases of the dead, a batch whose reply was lost, history, expiry
local taken_over, expired, more = 0, 0, false
local deadline, dead = renew(group, consumer, lease_ms, now)
if #dead > 0 then
  --@include takeover
  taken_over = take_over(group, dead, deadline, lease_ms, now)
end
if leased and not string.find(leased, ' ended', 1, true) then
  --@include leases
  local _, done = return_slot(group, slot, false, PAGE.taken_over)
  more = not done
end
if rule.keeps then
  --@include history
  trim_history(PAGE.history_beside)
end
if rule.unsorted then
  --@include sorting
  sort_groups()
  more = true
elseif rule.version and (rule.max_staleness or rule.max_token_staleness) then
  --@include staleness
  local rest
  expired, rest = expire_overdue(group, status)
  more = more or rest
end
if taken_over + expired > 0 or has_entered() then
  --@include waking
  if taken_over + expired > 0 then
    wake_room(now)
  end
  wake_returned(group, now)
end
if more then
  return {'more', expired}
end

-- how many groups this take may have: groups are reserved for takes before it in the queue
local queue, here, chosen, passed = pool
if where ~= '' then
  --@include draws queries
  queue = queue_of(pool, where)
  chosen, passed = first_where(group, pool, rule.names, cjson.decode(where), count)
  here = #chosen
else
  here = redis.call('ZCARD', key('ready', pool))
end
local free, most = here, rule.limit > 0 and rule.limit or rule.capacity
if rule.rate then
  --@include capacity
  free, most = bound_by_rate(group, free, most)
end
if most > 0 and least > most then
  return {'never', most}
end
local awaited = redis.call('EXISTS', key('queue', queue)) == 1
if awaited and where == '' then
  --@include waiters
  free = free - reserved_before(queue, waiter, now, free)
end
if free < least then
  --@include waiters waking
  if ttl_ms > 0 then
    enqueue(queue, waiter, count, ttl_ms, now)
  else
    dequeue(queue, waiter)
  end
  wake_others(pool, where, here, ttl_ms, now)
  local others, fates = 0, {}
  if ARGV[13] == '1' then
    --@include ledger fates
    others, fates = waiting_in_all_pools(group) - here, fates_of(group, pool)
  end
  return {'short', here, redis.call('ZCARD', key('queue', '#room')), expired, others, fates}
end
local amount = math.min(count, free)
local lease = {group = group, pool = pool, slot = slot, claimed = 0, lost = 0, members = {}, weights = {}}
local total = 'nan'
if rule.sampled and where == '' then
  --@include places
  total = string.format('%.17g', mass_of(pool))
end
local found
repeat -- bound: groups of the request
  found = chosen and {unpack(chosen, #lease.members + 1, math.min(#lease.members + PAGE.arguments, amount))}
    or lowest_of(pool, math.min(amount - lease.claimed, PAGE.arguments))
  local all
  if rule.version or rule.sampled then
    --@include staleness
    all = note_taken(group, pool, found, lease.weights, passed or {})
  end
  withdraw(group, pool, found, all)
  claim_members(lease, found)
until #found == 0 or lease.claimed == amount
redis.call('HSET', key('leases', group), slot, token)
add(key('group', group), 'taken', lease.claimed)
if lease.lost > 0 then
  forget_lost(lease)
end
if rule.rate then
  --@include waking
  wake_room(now)
end
if awaited then
  --@include waiters waking
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
local members = (rule.order ~= 'fifo' or lease.mixed) and lease.members or {}
return {'taken', lease.claimed, members, lease.weights, here - lease.claimed}
