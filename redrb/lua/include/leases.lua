-- Leases of consumers: requeued by their consumer or because it died (killed), or made dead letters.
--
-- deliveries:<group> holds failed deliveries by seq, consumers:<group> the deadline of each
-- consumer's heartbeat, leases:<group> a lease's token by slot. A slot is the consumer name under
-- which Redis keeps one lease: <consumer>/<number>.
--@include task facts pools pending groups

-- Move a leased entry, already out of the pending list, to the dead-letter stream.
local function add_dead_letter(group, seq, fields, reason, consumer)
  local deliveries = redis.call('HGET', key('deliveries', group), member_of(seq)) or '0'
  local letter = {'XADD', key('dead'), '*', 'seq', seq, 'group', group,
    'reason', reason, 'consumer', consumer, 'failed_deliveries', deliveries}
  for _, value in ipairs(fields) do
    letter[#letter + 1] = value
  end
  redis.call(unpack(letter))
  redis.call('HDEL', key('deliveries', group), member_of(seq))
  add(key('group', group), 'dead', 1)
end

local function max_deliveries()
  local stored = redis.call('HMGET', task, 'max_deliveries', 'default_max_deliveries')
  return tonumber(stored[1] or stored[2])
end

local function fields_of(seq)
  local id = id_of(seq)
  local entry = redis.call('XRANGE', stream, id, id)[1]
  return entry and entry[2] or {}
end

-- Let an entry wait that is neither leased nor waiting: in its old place, or in a newly drawn one.
local function requeue(group, seq)
  local member = member_of(seq)
  if rules().indexed then
    local facts = facts_of(member)
    if not facts then -- another client deleted the entry
      add(key('group', group), 'evicted', 1)
      return
    end
    enter(group, home_of(group, member, facts), {member}, {facts})
    let_evict(seq)
  else
    redis.call('ZADD', key('ready', group), seq, member)
  end
  add(key('group', group), 'waiting', 1)
end

-- End the lease of an entry: requeue it, or make it a dead letter if its deliveries failed too often.
-- `counted`: this counts as a failed delivery. Returns 1 if the entry was leased, else 0.
local function return_lease(group, seq, counted, consumer)
  local fields = counted and fields_of(seq)
  if redis.call('XACK', stream, group, id_of(seq)) == 0 then
    return 0
  end
  if rules().indexed then
    add(key('group', group), 'taken', -1)
  end
  if counted then
    local failed = redis.call('HINCRBY', key('deliveries', group), member_of(seq), 1)
    if failed >= max_deliveries() then
      left_unread(group, {seq})
      local reason = 'delivered ' .. failed .. ' times without acknowledgement'
      add_dead_letter(group, seq, fields, reason, consumer)
      forget(group, {seq})
      return 1
    end
  end
  requeue(group, seq)
  add(key('group', group), 'returned', 1)
  return 1
end

-- End the lease in a slot. Returns the number of its entries.
local function return_slot(group, slot, counted, consumer)
  local returned = 0
  each_leased(group, slot, function(seq)
    returned = returned + return_lease(group, seq, counted, consumer)
  end)
  return returned
end

-- End all leases of a consumer. Returns the number of their entries.
local function return_leases(group, consumer, counted)
  local returned = 0
  for _, slot in ipairs(redis.call('HKEYS', key('leases', group))) do
    if string.sub(slot, 1, #consumer + 1) == consumer .. '/' then
      returned = returned + return_slot(group, slot, counted, consumer)
      redis.call('HDEL', key('leases', group), slot)
      redis.call('XGROUP', 'DELCONSUMER', stream, group, slot)
    end
  end
  redis.call('ZREM', key('consumers', group), consumer)
  return returned
end

-- Renew a consumer's deadline, and end the leases of consumers whose deadline is over. If the caller's
-- deadline is over too, all deadlines are renewed instead: most likely Redis was away.
-- Returns the number of entries taken over, and the caller's old deadline, if it had one.
local function beat(group, consumer, lease_ms, now)
  local consumers = key('consumers', group)
  local deadline = redis.call('ZSCORE', consumers, consumer)
  local until_ms = string.format('%.0f', now + lease_ms)
  redis.call('ZADD', consumers, until_ms, consumer)
  local returned = 0
  for _, other in ipairs(redis.call('ZRANGEBYSCORE', consumers, '-inf', now)) do
    if deadline and tonumber(deadline) <= now then
      redis.call('ZADD', consumers, until_ms, other)
    else
      returned = returned + return_leases(group, other, true)
    end
  end
  add(key('group', group), 'taken_over', returned)
  return returned, deadline
end
