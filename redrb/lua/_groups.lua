-- What becomes of entries in the consumer groups.
--
-- In a consumer group an entry is waiting (seq > cursor, or returned to the sorted set
-- ready:<group>), leased (in the pending list) or done. It is deleted when it is done in all.
-- group:<group> holds cursor and counters, deliveries:<group> failed deliveries by seq,
-- consumers:<group> the deadline of each consumer's heartbeat, leases:<group> a lease's token by
-- slot. A slot is the consumer name under which Redis keeps one lease: <consumer>/<number>.

local function delete(seqs)
  if #seqs == 0 then
    return 0
  end
  local sized = number(task, 'max_bytes') > 0
  local deleted = 0
  for first = 1, #seqs, 1000 do
    local ids, fields = {}, {}
    for i = first, math.min(first + 999, #seqs) do
      ids[i - first + 1] = id_of(seqs[i])
      fields[i - first + 1] = seqs[i]
    end
    deleted = deleted + redis.call('XDEL', stream, unpack(ids))
    if sized then
      local freed = 0
      for _, size in ipairs(redis.call('HMGET', key('sizes'), unpack(fields))) do
        freed = freed + tonumber(size or '0')
      end
      add(task, 'bytes', -freed)
      redis.call('HDEL', key('sizes'), unpack(fields))
    end
  end
  return deleted
end

local function is_leased(group, seq)
  local id = id_of(seq)
  return #redis.call('XPENDING', stream, group, id, id, 1) > 0
end

local function is_waiting(group, seq)
  return tonumber(seq) > number(key('group', group), 'cursor')
    or redis.call('ZSCORE', key('ready', group), member_of(seq))
end

-- Delete entries that are done in `group`, unless another group still needs them.
local function forget(group, seqs)
  local all = groups()
  if #all == 1 and all[1] == group then
    return delete(seqs)
  end
  local over = {}
  for _, seq in ipairs(seqs) do
    local needed = false
    for _, other in ipairs(all) do
      if other ~= group and (is_waiting(other, seq) or is_leased(other, seq)) then
        needed = true
        break
      end
    end
    if not needed then
      over[#over + 1] = seq
    end
  end
  return delete(over)
end

-- Make sure that the consumer group exists; a new one sees all that is stored.
local function join(group)
  if redis.call('SADD', key('groups'), group) == 0 then
    return
  end
  redis.call('XGROUP', 'CREATE', stream, group, '0')
  local cursor = number(task, 'last')
  local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  if first then
    cursor = seq_of(first[1]) - 1
  end
  local stored = redis.call('XLEN', stream)
  redis.call('HSET', key('group', group), 'cursor', string.format('%.0f', cursor),
    'put', stored, 'waiting', stored)
end

-- Move a leased entry, already out of the pending list, to the dead-letter stream.
local function bury(group, seq, fields, reason, consumer)
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
  return tonumber(redis.call('HGET', task, 'max_deliveries') or '5')
end

local function fields_of(seq)
  local id = id_of(seq)
  local entry = redis.call('XRANGE', stream, id, id)[1]
  return entry and entry[2] or {}
end

-- Put a leased entry back to the waiting ones, or bury it when its deliveries failed too often.
-- Returns 1 when it was leased.
local function return_lease(group, seq, counted, consumer)
  local fields = counted and fields_of(seq)
  if redis.call('XACK', stream, group, id_of(seq)) == 0 then
    return 0
  end
  if counted then
    local failed = redis.call('HINCRBY', key('deliveries', group), member_of(seq), 1)
    if failed >= max_deliveries() then
      bury(group, seq, fields, 'delivered ' .. failed .. ' times without acknowledgement', consumer)
      forget(group, {seq})
      return 1
    end
  end
  redis.call('ZADD', key('ready', group), seq, member_of(seq))
  add(key('group', group), 'waiting', 1)
  add(key('group', group), 'returned', 1)
  return 1
end

-- Return all that a slot holds. Returns the number of entries.
local function return_slot(group, slot, counted, consumer)
  local returned, pending = 0, {}
  repeat
    pending = redis.call('XPENDING', stream, group, '-', '+', 500, slot)
    for _, entry in ipairs(pending) do
      returned = returned + return_lease(group, seq_of(entry[1]), counted, consumer)
    end
  until #pending == 0
  return returned
end

-- Take every lease from a consumer. Returns the number of entries that it held.
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

-- Say that a consumer lives, and take the leases of those whose heartbeat stopped. One that comes
-- late itself judges nobody: most likely Redis was away, and the others are just coming back too.
-- Returns the number of entries taken over, and whether the consumer was known.
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
