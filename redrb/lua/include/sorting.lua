-- Sorts groups again after the order of a used task has changed, or its places were restarted.
--
-- The field unsorted of the task says which groups may have their former place yet. They are sorted by
-- arrival, so their id says whether they are. Facts that are read meanwhile have the score of the new order,
-- and nobody takes groups.
--@include task facts settings pools candidates indexes

-- Give a waiting group its place in the order, in each consumer group for which it waits.
local function sort_group(all, member, facts)
  store_facts(member, facts)
  for _, group in ipairs(all) do
    local pool = home_of(group, member, facts)
    local ready = key('ready', pool)
    if redis.call('ZSCORE', ready, member) then
      redis.call('ZADD', ready, place(facts, member, clock_of(group, pool)), member)
      if rules().sampled then
        --@include places
        weigh(pool, {}, {facts}, 1) -- without its id, which would say that it is not sorted yet
      end
    end
  end
end

-- Note that all groups up to an id are sorted.
local function note_sorted(seq, last)
  if seq < last then
    redis.call('HSET', task, 'unsorted', string.format('%.0f %.0f', seq, last))
  else
    redis.call('HDEL', task, 'unsorted')
  end
  pack_rules()
  known_rules = nil
  if sorts_by_version() then
    drop_index('versions')
  end
end

-- Sort the next page of groups. Returns whether there is more.
local function sort_groups()
  local at, last = rules().sorted, rules().unsorted
  if not last then
    return false
  end
  local all, found, looks = groups(), 0, 0
  while at < last and found < PAGE.sorted and looks < PAGE.sorting_looks do -- bound: PAGE.sorting_looks
    local members, stored = {}, false
    for seq = at + 1, math.min(at + PAGE.sorted, last) do
      members[#members + 1] = member_of(seq)
    end
    for i, facts in ipairs(facts_of_all(members)) do
      if facts then
        sort_group(all, members[i], facts)
        found, stored = found + 1, true
      end
    end
    at, looks = at + #members, looks + #members
    if not stored then -- a gap
      at = stored_after(at, last) - 1
    end
  end
  note_sorted(at, last)
  return at < last
end
