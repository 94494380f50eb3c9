-- Lease a full batch, or nothing and queue for it. Payload is then read with
-- XREADGROUP GROUP group slot STREAMS stream 0.
-- KEYS[1] stream
-- ARGV    group, consumer, slot, token, count, least, waiter, ttl_ms, lease_ms, status, where
--         token names the lease: a repeated take with the same one finds what it leased
--         least: entries accepted instead of `count`; ttl_ms 0: do not queue, leave the queue
--         where: JSON of a query, or ''
-- Returns {'taken', entries, {member ...} in the task's order, or {}, {weight ..., sum of weights}}
--       | {'short', waiting, producers that wait for room, groups that just expired,
--         groups that wait with another status} | {'never', limit} | {'gone'}
--@ _task _waiters _room _tags _plan _where _index _groups _membership _leases _expire

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
local counters, new = numbers(state, 'cursor', 'waiting')
if new then
  join(group)
  counters = numbers(state, 'cursor', 'waiting')
end
local leased = redis.call('HGET', key('leases', group), slot)
if leased == token then
  return taken_before(group, pool, redis.call('XPENDING', stream, group, '-', '+', count, slot))
end
local taken_over = beat(group, consumer, tonumber(ARGV[9]), now)
-- what an earlier take leased here, and its consumer never heard of, goes back
local returned = 0
if leased and not string.find(leased, ' ended', 1, true) then
  returned = return_slot(group, slot, false, consumer)
end
local expired = indexed and expire_overdue(group, status) or 0
if taken_over + expired > 0 then
  wake('#room', room_left(), now)
end
if returned + taken_over > 0 and indexed then
  wake_pools(group, now)
end
if expired > 0 and rules().keep then
  wake_pool(pool_of(group, 'expired'), now)
end
if returned + taken_over + expired > 0 then
  counters = numbers(state, 'cursor', 'waiting')
end
local cursor, waiting = counters[1], counters[2]
local most = limit > 0 and limit or known[3]
if most > 0 and least > most then
  return {'never', most}
end

-- what this take may have: not what waits for those before it in the queue
local here, queue, chosen, free = waiting, pool, nil, 0
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

local claimed, lost, members, weights = 0, 0, {}, {}
local total = rules().sampled and redis.call('HGET', key('mass', group), pool) or '0'
local function claim(ids)
  local held = ids
  if #ids > 0 then
    local command = {'XCLAIM', stream, group, slot, 0}
    for i, id in ipairs(ids) do
      command[5 + i] = id
    end
    command[6 + #ids] = 'FORCE'
    command[7 + #ids] = 'JUSTID'
    held = redis.call(unpack(command))
    claimed = claimed + #held
  end
  return held
end

local function claim_members(found)
  local ids = {}
  for i, member in ipairs(found) do
    ids[i] = BASE .. member
    members[#members + 1] = member
  end
  if indexed then
    note_taken(group, pool, found, weights)
    withdraw(group, pool, found)
  else
    in_parts('ZREM', key('ready', pool), found)
  end
  local held = #claim(ids)
  lost = lost + #ids - held
  if held < #ids and indexed then -- someone deleted entries behind our back
    for i in ipairs(ids) do
      if not is_leased(group, found[i]) then
        redis.call('HDEL', key('facts'), found[i])
      end
    end
  end
end

if chosen then
  for first = 1, count, 1000 do
    claim_members({unpack(chosen, first, math.min(first + 999, count))})
  end
else
  local back -- in a plain task: what came back is older than what was never delivered
  repeat
    back = redis.call('ZRANGE', key('ready', pool), 0, math.min(count - claimed, 1000) - 1)
    claim_members(back)
  until #back == 0 or claimed == count
  while claimed < count and cursor < last do -- of a plain task; puts that were undone left gaps
    local upto = math.min(cursor + math.min(count - claimed, 1000), last)
    local ids = {}
    for seq = cursor + 1, upto do
      ids[seq - cursor] = id_of(seq)
    end
    claim(ids)
    cursor = upto
  end
  if claimed < count and not indexed then
    lost = waiting - claimed
  end
end
redis.call('HSET', state, 'cursor', string.format('%.0f', cursor),
  'waiting', string.format('%.0f', waiting - claimed - lost))
redis.call('HSET', key('leases', group), slot, token)
-- entries that someone deleted behind our back
add(state, 'evicted', lost)
if indexed then
  add(state, 'taken', claimed)
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
if #weights > 0 then
  weights[#weights + 1] = total
end
return {'taken', claimed, indexed and members or {}, weights}
