-- Leases of consumers: requeued by their consumer or because it died (killed), or made dead letters.
--
-- deliveries:<group> holds failed deliveries by seq, consumers:<group> the deadline of each
-- consumer's heartbeat, leases:<group> a lease's token by slot. A slot is the consumer name under
-- which Redis keeps one lease: <consumer>/<number>. The string spared:<group> holds a time: consumers whose
-- deadline was over then live on; it expires.
--@include task facts pools pending groups heartbeats dead_letters

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
  local facts = facts_of(member)
  if not facts then -- another client deleted the entry
    add(key('group', group), 'evicted', 1)
    return
  end
  enter(group, home_of(group, member, facts), {member}, {facts})
  if rules().order == 'fifo' and facts.score then -- a requeued dead letter is evicted by its old arrival
    redis.call('ZADD', key('behind'), facts.score, member)
  else
    let_evict({seq})
  end
end

-- End the lease of an entry: requeue it, or make it a dead letter if its deliveries failed too often.
-- `failure`: this counts as a failed delivery, which ended as add_dead_letter says; or false. Returns 1 if
-- the entry was leased, else 0.
local function return_lease(group, seq, failure)
  local fields = failure and fields_of(seq)
  if redis.call('XACK', stream, group, id_of(seq)) == 0 then
    return 0
  end
  add(key('group', group), 'taken', -1)
  if failure then
    local failed = redis.call('HINCRBY', key('deliveries', group), member_of(seq), 1)
    if failed >= max_deliveries() then
      local unread = left_unread(group, {seq})
      local reason = 'delivered ' .. failed .. ' times without acknowledgement'
      add_dead_letter(group, seq, fields, failure, reason, unread)
      forget(group, {seq})
      return 1
    end
  end
  requeue(group, seq)
  add(key('group', group), 'returned', 1)
  return 1
end

-- End the lease in a slot, or `most` entries of it. Returns the number of entries returned, and of
-- entries looked at.
local function return_slot(group, slot, failure, most)
  local returned, seen = 0, 0
  each_leased(group, slot, function(seq)
    returned, seen = returned + return_lease(group, seq, failure), seen + 1
    return seen == most
  end)
  return returned, seen
end

-- The slots in which a consumer has leases. It numbers them from 0 and uses the lowest free one.
local function slots_of(group, consumer)
  local found, first, any = {}, 0, true
  while any do
    local slots = {}
    for i = 1, PAGE.slots do
      slots[i] = string.format('%s/%d', consumer, first + i - 1)
    end
    any = false
    for i, token in ipairs(redis.call('HMGET', key('leases', group), unpack(slots))) do
      if token then
        found[#found + 1], any = slots[i], true
      end
    end
    first = first + PAGE.slots
  end
  return found
end

-- End the leases of a consumer in these slots, at most `most` entries: then it is called again later.
-- Returns the number of entries returned.
local function return_leases(group, consumer, slots, failed, most)
  local returned, left, failure = 0, most, failed and {consumer = consumer}
  for _, slot in ipairs(slots) do
    local ended, seen = return_slot(group, slot, failure, left)
    returned, left = returned + ended, left - seen
    if left == 0 then
      return returned
    end
    redis.call('HDEL', key('leases', group), slot)
    redis.call('XGROUP', 'DELCONSUMER', stream, group, slot)
  end
  redis.call('ZREM', key('consumers', group), consumer)
  return returned
end

-- End the leases of consumers whose deadline is over: `dead` is a flat list consumer, deadline. If the
-- caller's deadline was over too, all deadlines are renewed instead: most likely Redis was away. At most
-- PAGE.taken_over entries are taken over in one call, the others in the next ones. Returns their number.
local function take_over(group, dead, deadline, lease_ms, now)
  if deadline and tonumber(deadline) <= now then
    redis.call('SET', key('spared', group), string.format('%.0f', now), 'PX', lease_ms)
  end
  local spared, returned = tonumber(redis.call('GET', key('spared', group)) or '0'), 0
  for i = 1, #dead, 2 do
    local left = PAGE.taken_over - returned
    if tonumber(dead[i + 1]) <= spared then
      redis.call('ZADD', key('consumers', group), string.format('%.0f', now + lease_ms), dead[i])
    elseif left > 0 then
      returned = returned + return_leases(group, dead[i], slots_of(group, dead[i]), true, left)
    end
  end
  add(key('group', group), 'taken_over', returned)
  return returned
end

-- Renew a consumer's deadline, and take over. Returns the number of entries taken over, and the
-- consumer's old deadline, if it had one.
local function beat(group, consumer, lease_ms, now)
  local deadline, dead = renew(group, consumer, lease_ms, now)
  return take_over(group, dead, deadline, lease_ms, now), deadline
end
