-- Deletes waiting groups to make room; leased groups never go.
--@include task pools history groups candidates

-- Evict one group if it waits: 'stored', else false. A group of the history, which makes room for bytes
-- only, is deleted if `history` is set: 'history'. `counts` counts the groups that each consumer group loses.
local function evict_one(all, seq, history, counts)
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
  for _, found in ipairs(waits) do
    local group, pool = found[1], found[2]
    left_unread(group, {seq})
    withdraw(group, pool, {member})
    local notes = {key('moved', group), key('expiries', group), key('reads', group), key('deliveries', group)}
    if redis.call('EXISTS', unpack(notes)) > 0 then
      for _, name in ipairs(notes) do
        redis.call('HDEL', name, member)
      end
    end
    counts[group] = (counts[group] or 0) + 1
  end
  delete({seq})
  return 'stored'
end

-- Evict until `excess` groups and `excess_bytes` bytes are gone, or no more group can be evicted.
-- `history`: deleted history counts as groups, too. Returns the number of entries evicted.
local function evict(excess, excess_bytes, history)
  local all, last, evicted, stored, counts = groups(), number(puts, 'last'), 0, 0, {}
  local eviction = redis.call('HGET', task, 'eviction')
  local sources = {}
  if history or excess_bytes > 0 then
    sources[1] = sorted_candidates(key('archive'), 'ZRANGE')
  end
  if eviction == 'stalest' and all[1] then
    sources[#sources + 1] = sorted_candidates(versions_of(all[1]), 'ZRANGE')
  elseif eviction == 'last' and all[1] then
    sources[#sources + 1] = sorted_candidates(key('ready', all[1]), 'ZREVRANGE')
  end
  sources[#sources + 1] = oldest_candidates(last) -- groups that wait in other pools, or have no version
  local by_bytes, bytes, at, gone = excess_bytes > 0, number(task, 'bytes'), 1, nil
  while sources[at] and (excess > 0 or excess_bytes > 0) do
    local seq = sources[at](gone)
    if seq then
      gone = evict_one(all, seq, history or excess_bytes > 0, counts)
    else
      at, gone = at + 1, nil
    end
    if gone then
      evicted, stored = evicted + 1, stored + (gone == 'stored' and 1 or 0)
      excess = excess - ((gone == 'stored' or history) and 1 or 0)
      local left = by_bytes and number(task, 'bytes') or bytes
      excess_bytes, bytes = excess_bytes - (bytes - left), left
    end
  end
  add(task, 'evicted', stored)
  for group, count in pairs(counts) do
    add(key('group', group), 'evicted', count)
  end
  return evicted
end
