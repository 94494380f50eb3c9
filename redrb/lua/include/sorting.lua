-- Gives groups of a random order new places after the places were restarted (include/places.lua).
--
-- The field unsorted of the task says which groups may have their former place yet. They get new ones by
-- arrival, so their id says whether they have. Nobody takes groups meanwhile.
--@include task facts settings pools candidates places

-- Give a waiting group its place in the order, in each consumer group for which it waits.
local function sort_group(all, member, facts)
  for _, group in ipairs(all) do
    local pool = home_of(group, member, facts)
    local ready = key('ready', pool)
    if redis.call('ZSCORE', ready, member) then
      redis.call('ZADD', ready, place(facts, member, clock_of(group, pool)), member)
      weigh(pool, {}, {facts}, 1) -- without its id, which would say that it has none yet
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
