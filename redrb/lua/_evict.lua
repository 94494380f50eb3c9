-- Which groups go when there is no room: never one that is leased.

-- Evict one. Returns false, 'stored', or 'history' for one that was only kept to be read again: that
-- makes room for bytes and not for groups, and is done where `history` says so.
local function evict_one(all, seq, history)
  local waits, member = {}, member_of(seq)
  if redis.call('ZSCORE', key('archive'), member) then
    if history then
      redis.call('ZREM', key('archive'), member)
      delete({seq})
    end
    return history and 'history'
  end
  for _, group in ipairs(all) do
    local pool = waits_in(group, seq)
    if pool then
      waits[#waits + 1] = {group, pool}
    elseif is_leased(group, seq) then
      return false
    end
  end
  if #waits == 0 and #all > 0 then
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
      redis.call('HDEL', key('reads', group), member)
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
  return 'stored'
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

-- In an indexed one, by arrival: `floor` is kept, so that nobody looks twice at what is gone, or
-- history.
local function oldest_candidates(last)
  local seq, gone = number(task, 'floor'), true
  return function()
    while seq <= last do
      local member = member_of(seq)
      local here = redis.call('HEXISTS', key('facts'), member) == 1
        and not redis.call('ZSCORE', key('archive'), member)
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

-- Or what is first (history, `stalest`) or last (`last`) in a sorted set, the latter two in one of
-- the first consumer group.
local function sorted_candidates(name, command)
  local rank = 0
  return function(gone)
    rank = rank + (gone == false and 1 or 0)
    local member = redis.call(command, name, rank, rank)[1]
    return member and tonumber(member)
  end
end

-- Evict until `excess` groups and `excess_bytes` bytes are gone, or nothing more can be. `history`:
-- that of what is only kept counts too.
local function evict(excess, excess_bytes, history)
  local all, last, evicted = groups(), number(task, 'last'), 0
  local eviction = redis.call('HGET', task, 'eviction')
  local sources = {}
  if not rules().indexed then
    sources[1] = plain_candidates(all, last)
  else
    if history or excess_bytes > 0 then
      sources[1] = sorted_candidates(key('archive'), 'ZRANGE')
    end
    if eviction == 'stalest' and all[1] then
      sources[#sources + 1] = sorted_candidates(versions_of(all[1]), 'ZRANGE')
    elseif eviction == 'last' and all[1] then
      sources[#sources + 1] = sorted_candidates(key('ready', all[1]), 'ZREVRANGE')
    end
    sources[#sources + 1] = oldest_candidates(last) -- what waits elsewhere, or has no version
  end
  local bytes, at, gone = number(task, 'bytes'), 1, nil
  while sources[at] and (excess > 0 or excess_bytes > 0) do
    local seq = sources[at](gone)
    if seq then
      gone = evict_one(all, seq, history or excess_bytes > 0)
    else
      at, gone = at + 1, nil
    end
    if gone then
      evicted = evicted + 1
      excess = excess - ((gone == 'stored' or history) and 1 or 0)
      local left = number(task, 'bytes')
      excess_bytes, bytes = excess_bytes - (bytes - left), left
    end
  end
  return evicted
end
