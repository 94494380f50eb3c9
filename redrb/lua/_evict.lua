-- Which groups go when there is no room: never one that is leased.

local function evict_one(all, seq)
  local waits, member = {}, member_of(seq)
  for _, group in ipairs(all) do
    local pool = waits_in(group, seq)
    if pool then
      waits[#waits + 1] = {group, pool}
    elseif is_leased(group, seq) then
      return false
    end
  end
  local archived = redis.call('ZREM', key('archive'), member) == 1
  if #waits == 0 and #all > 0 and not archived then
    return false
  end
  local indexed = rules().indexed
  if not indexed and delete({seq}) == 0 then -- a put that was undone left a gap
    return false
  end
  for _, found in ipairs(waits) do
    local group, pool = found[1], found[2]
    if indexed then
      withdraw(group, pool, {member})
      redis.call('HDEL', key('moved', group), member)
      redis.call('HDEL', key('expiries', group), member)
    else
      redis.call('ZREM', key('ready', group), member)
    end
    redis.call('HDEL', key('deliveries', group), member)
    add(key('group', group), 'waiting', -1)
    add(key('group', group), 'evicted', 1)
    left_unread(group, 1)
  end
  if indexed then
    delete({seq})
  end
  add(task, 'evicted', 1)
  return true
end

-- Candidates one by one, in a plain task: entries that came back, and those that some group was
-- never given, by arrival.
local function plain_candidates(all, last)
  local returned, seen, fresh = {}, {}, last + 1
  for _, group in ipairs(all) do
    fresh = math.min(fresh, number(key('group', group), 'cursor') + 1)
    for _, member in ipairs(redis.call('ZRANGE', key('ready', group), 0, -1)) do
      if not seen[member] then
        seen[member] = true
        returned[#returned + 1] = tonumber(member)
      end
    end
  end
  table.sort(returned)
  if #all == 0 then
    local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
    fresh = first and seq_of(first[1]) or fresh
  end
  local index = 1
  return function()
    local seq = returned[index]
    if seq and seq <= fresh then
      index = index + 1
      return seq
    end
    fresh = fresh + 1
    return fresh - 1 <= last and fresh - 1 or nil
  end
end

-- In an indexed one, by arrival: `floor` is kept, so that nobody looks twice at what is gone.
local function oldest_candidates(last)
  local seq, gone = number(task, 'floor'), true
  return function()
    while seq <= last do
      local here = redis.call('HEXISTS', key('facts'), member_of(seq)) == 1
      if gone and not here then
        redis.call('HSET', task, 'floor', string.format('%.0f', seq + 1))
      end
      gone = gone and not here
      seq = seq + 1
      if here then
        return seq - 1
      end
    end
    return nil
  end
end

-- Or what is first (`stalest`) or last (`last`) in a sorted set of the first consumer group.
local function sorted_candidates(name, command)
  local rank = 0
  return function(gone)
    rank = rank + (gone == false and 1 or 0)
    local member = redis.call(command, name, rank, rank)[1]
    return member and tonumber(member)
  end
end

-- Evict until `excess` groups and `excess_bytes` bytes are gone, or nothing more can be.
local function evict(excess, excess_bytes)
  local all, last, evicted = groups(), number(task, 'last'), 0
  local eviction = redis.call('HGET', task, 'eviction')
  local next_one
  if not rules().indexed then
    next_one = plain_candidates(all, last)
  elseif eviction == 'stalest' and all[1] then
    next_one = sorted_candidates(versions_of(all[1]), 'ZRANGE')
  elseif eviction == 'last' and all[1] then
    next_one = sorted_candidates(key('ready', all[1]), 'ZREVRANGE')
  else
    next_one = oldest_candidates(last)
  end
  local bytes, gone = number(task, 'bytes'), nil
  while excess > 0 or excess_bytes > 0 do
    local seq = next_one(gone)
    if not seq then
      break
    end
    gone = evict_one(all, seq)
    if gone then
      evicted = evicted + 1
      excess = excess - 1
      local left = number(task, 'bytes')
      excess_bytes, bytes = excess_bytes - (bytes - left), left
    end
  end
  return evicted
end
