-- Lease a full batch, or lease nothing and queue. Payload is then read: XREADGROUP GROUP group slot
-- KEYS[1] stream
-- ARGV    the call `Take` of redrb/stream/take/calls.py
--         Repeated with the same token, a take returns the batch that it leased.
-- Returns its reply
--@include task clock facts pools heartbeats leasing
--@before take/finish take/recheck

begin_writing()
local rule = rules()
local ask = cmsgpack.unpack(ARGV[1])
local group, consumer, slot, token = ask.group, ask.consumer, ask.slot, ask.token
local count, least = ask.request.count, ask.request.least
local status, where = ask.request.status, ask.request.where
local waiter, ttl_ms, lease_ms = ask.waiter, ask.ttl_ms, ask.lease_ms
local known = rule.exists and rule.revision == ask.revision
if not known and (not rule.exists or redis.call('SISMEMBER', key('groups'), group) == 0) then
  return cmsgpack.pack({outcome = 'gone'})
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
  return cmsgpack.pack({outcome = 'gone'})
elseif leased == token then
  --@include staleness
  local held = redis.call('XPENDING', stream, group, '-', '+', count, slot)
  return cmsgpack.pack(taken_before(pool_of(group, status), held))
elseif leased and tonumber(string.match(leased, '^%d+')) >= tonumber(token) then
  return cmsgpack.pack({outcome = 'late'})
end
local pool, now = pool_of(group, status), set_clock(lease_ms, rule.clock)
if redis.call('SISMEMBER', key('groups'), group) == 0 or redis.call('EXISTS', key('joining', group)) == 1 then
  --@include membership
  if not join(group) then
    return cmsgpack.pack({outcome = 'more'})
  end
end

-- before: leases of the dead, a batch whose reply was lost, expiry
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
  wake_entered(now)
end
if more then
  return cmsgpack.pack({outcome = 'more', expired = expired})
end

-- how many groups this take may have: groups are reserved for takes before it in the queue
local queue, here, chosen = pool
if where ~= '' and rule.sampled then
  return cmsgpack.pack({outcome = 'drawn'})
elseif where ~= '' then
  --@include search queries
  queue = queue_of(pool, where)
  here, chosen = search(pool, ask, count, now)
  if not here then
    return cmsgpack.pack({outcome = 'more', expired = expired, search = chosen})
  end
else
  here = redis.call('ZCARD', key('ready', pool))
end
local free, most = here, rule.limit
if rule.max_waiting > 0 then -- groups that return may be more
  most = math.min(most > 0 and most or math.huge, math.max(rule.max_waiting, here))
end
if most > 0 and least > most then
  --@include waiters waking
  dequeue(queue, waiter)
  wake_others(pool, where, 0, now)
  return cmsgpack.pack({outcome = 'never', amount = most})
end
local awaited = redis.call('EXISTS', key('queue', queue)) == 1
if awaited and where == '' then
  --@include waiters
  free = free - reserved_before(queue, waiter, now, free)
end
if free < least then
  --@include waiters waking
  if ttl_ms == 0 then
    dequeue(queue, waiter)
  elseif where == '' then -- else it waits already
    enqueue(queue, waiter, count, ttl_ms, now)
  end
  wake_others(pool, where, ttl_ms, now)
  local others, fates = 0
  if ask.report then
    --@include ledger outcomes
    others, fates = waiting_in_all_pools(group) - here, fates_of(group, pool)
  end
  local blocked = redis.call('ZCARD', key('queue', '#room'))
  return cmsgpack.pack({outcome = 'short', amount = here, blocked = blocked, expired = expired,
    others = others, fates = fates})
end
local amount = math.min(count, free)
local lease = {group = group, pool = pool, slot = slot, claimed = 0, lost = 0, members = {}, weights = {}}
local total
if rule.sampled then
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
    all = note_taken(group, pool, found, lease.weights)
  end
  withdraw(group, pool, found, all)
  claim_members(lease, found)
until #found == 0 or lease.claimed == amount
redis.call('HSET', key('leases', group), slot, token)
if lease.lost > 0 then
  forget_lost(lease)
end
if rule.max_waiting > 0 then
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
local members = rule.order ~= 'fifo' and lease.members or {}
return cmsgpack.pack({outcome = 'taken', amount = lease.claimed, members = members, weights = lease.weights,
  total_weight = total})
