-- Which groups go when there is no room: never one that is leased.
--@include task index history room groups

-- Evict one. Returns false, 'stored', or 'history' for one that was only kept to be read again: that
-- makes room for bytes and not for groups, and is done where `history` says so.
local function evict_one(all, seq, history)
  local waits, member = {}, member_of(seq)
  if redis.call('ZSCORE', key('archive'), member) then
    if history then
      drop_history({member})
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
    left_unread(group, {seq})
    if indexed then
      withdraw(group, pool, {member})
      redis.call('HDEL', key('moved', group), member)
      redis.call('HDEL', key('expiries', group), member)
      redis.call('HDEL', key('reads', group), member)
    elseif redis.call('ZREM', key('ready', group), member) == 0
      and number(key('group', group), 'cursor') == seq - 1 then -- nobody looks twice at what is gone
      redis.call('HSET', key('group', group), 'cursor', string.format('%.0f', seq))
    end
    redis.call('HDEL', key('deliveries', group), member)
    add(key('group', group), 'waiting', -1)
    add(key('group', group), 'evicted', 1)
  end
  if indexed then
    delete({seq})
  end
  add(task, 'evicted', 1)
  return 'stored'
end

-- The first entry that is stored beyond one; it comes with its bytes.
local function stored_after(seq, last)
  local entry = redis.call('XRANGE', stream, '(' .. id_of(seq), '+', 'COUNT', 1)[1]
  return entry and seq_of(entry[1]) or last + 1
end

-- Candidates in a plain task: entries that came back, and those that some group was never given.
local function plain_candidates(all, last)
  local returned, seen, fresh = {}, {}, last
  for _, group in ipairs(all) do
    fresh = math.min(fresh, number(key('group', group), 'cursor'))
    last = redis.call('ZCARD', key('ready', group)) > 4000 and 0 or last -- those beyond come later
    for _, member in ipairs(redis.call('ZRANGE', key('ready', group), 0, 3999)) do
      if not seen[member] then
        seen[member] = true
        returned[#returned + 1] = tonumber(member)
      end
    end
  end
  table.sort(returned)
  local index, looked = 1, #all == 0 and 0 or fresh
  fresh = #all == 0 and stored_after(0, last) or fresh + 1
  return function(gone)
    if gone == false and looked == fresh - 1 then -- leased by some, or a gap
      fresh = stored_after(looked, last)
    end
    local seq = returned[index]
    if seq and seq <= fresh then
      index, looked = index + 1, nil
      return seq
    end
    looked, fresh = fresh, fresh + 1
    return looked <= last and looked or nil
  end
end

-- In an indexed one, by arrival. `floor` is kept: entries below it are gone, history or leased, and
-- nobody looks at them again; behind has those that were let go since. After so many looks the rest
-- is left to the next call.
local LOOKS = 10000
local function oldest_candidates(last)
  local found, at, looks, window = {}, 0, 0, 4
  local next_seq = number(task, 'floor')
  if next_seq == 0 then
    next_seq = stored_after(0, last)
  end
  local function look()
    local members, first = {}, next_seq
    next_seq = math.min(first + window, last + 1)
    for seq = first, next_seq - 1 do
      members[#members + 1] = member_of(seq)
    end
    local facts = redis.call('HMGET', key('facts'), unpack(members))
    local kept = redis.call('ZMSCORE', key('archive'), unpack(members))
    local stored = false
    found, at = {}, 0
    for i = 1, #members do
      stored = stored or facts[i]
      if facts[i] and not kept[i] then
        found[#found + 1] = first + i - 1
      end
    end
    if not stored and window > 100 then -- a wide gap
      next_seq = stored_after(next_seq - 1, last)
    end
    looks, window = looks + #members, math.min(window * 2, 128)
  end
  return function()
    local behind = redis.call('ZPOPMIN', key('behind'))
    if behind[1] then
      return tonumber(behind[1])
    end
    while at == #found and next_seq <= last and looks < LOOKS do
      look()
    end
    at = at + 1
    local seq = found[at]
    redis.call('HSET', task, 'floor', string.format('%.0f', (seq or next_seq - 1) + 1))
    return seq
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
