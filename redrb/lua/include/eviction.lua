-- Deletes waiting groups to make room, many at a time; leased groups never go.
--@include task put_record facts pools deletion groups pending candidates

-- Which candidates may go: `free` has true for a group that waits and that nobody leases. waits[group][i] is
-- the pool in which it waits for a consumer group.
local function free_candidates(all, seqs, members, facts)
  local free, waits = {}, {}
  for i = 1, #seqs do
    free[i] = #all == 0 or nil
  end
  for _, group in ipairs(all) do
    local pools, others = pools_among(group, members, facts), {}
    for i, seq in ipairs(seqs) do
      if free[i] ~= false then
        if pools[i] then
          free[i] = true
        else
          others[#others + 1] = seq
        end
      end
    end
    local leased = leased_among(group, others)
    for i, seq in ipairs(seqs) do
      if leased[seq] then
        free[i] = false
      end
    end
    waits[group] = pools
  end
  return free, waits
end

-- Take the groups with the numbers `chosen` out of the pools in which they wait for a consumer group.
-- Returns how many waited.
local function withdraw_chosen(group, pools, chosen, members, facts)
  local by_pool, gone = {}, {}
  for _, i in ipairs(chosen) do
    local pool = pools[i]
    if pool then
      by_pool[pool] = by_pool[pool] or {{}, {}}
      table.insert(by_pool[pool][1], members[i])
      table.insert(by_pool[pool][2], facts[i])
      gone[#gone + 1] = members[i]
    end
  end
  if #gone == 0 then
    return 0
  end
  for pool, found in pairs(by_pool) do
    withdraw(group, pool, found[1], found[2])
  end
  local notes = {key('moved', group), key('expiries', group), key('reads', group), key('deliveries', group)}
  if redis.call('EXISTS', unpack(notes)) > 0 then
    for _, name in ipairs(notes) do
      in_parts('HDEL', name, gone)
    end
  end
  return #gone
end

-- Evict candidates, the first ones first, as far as they are needed: `need` holds the `groups` and `bytes`
-- that are to go; `since`, after which bytes count; `evicted`, the groups that went; `counts`, by consumer
-- group. Returns how many candidates it looked at, and how many of those stay.
local function evict_candidates(all, seqs, need)
  local members, used, chosen, gone = {}, 0, {}, {}
  for i, seq in ipairs(seqs) do
    members[i] = member_of(seq)
  end
  local facts = facts_of_all(members)
  local free, waits = free_candidates(all, seqs, members, facts)
  while used < #seqs and (need.groups > 0 or need.bytes > 0) do -- bound: seqs
    used = used + 1
    if free[used] then
      local seq = seqs[used]
      chosen[#chosen + 1], gone[#gone + 1] = used, seq
      need.groups = need.groups - 1
      need.bytes = need.bytes - (facts[used] and seq > need.since and facts[used].size or 0)
    end
  end
  for _, group in ipairs(#chosen > 0 and all or {}) do
    need.counts[group] = (need.counts[group] or 0)
      + withdraw_chosen(group, waits[group], chosen, members, facts)
  end
  delete(gone)
  need.evicted = need.evicted + #gone
  return used, used - #gone
end

-- How many candidates to look at: as many as the bytes that are to go are of groups of mean size.
local function wanted(need, most)
  local count = need.groups
  if need.bytes > 0 then
    local mean = number(task, 'bytes') / math.max(redis.call('XLEN', stream), 1)
    count = math.max(count, math.ceil(need.bytes / math.max(mean, 1)))
  end
  return math.min(count, most - need.evicted)
end

-- Evict until `excess` groups and `excess_bytes` bytes are gone, `most` groups are, or no more group can be
-- evicted; with `stalest`, those of the lowest version first. Returns the number of groups evicted, and
-- whether `most` were too few.
local function evict(excess, excess_bytes, most, stalest)
  local all, last = groups(), last_counted()
  local need = {groups = excess, bytes = excess_bytes, evicted = 0,
    since = excess_bytes > 0 and number(task, 'sized_after') or math.huge, counts = {}}
  local sources = {}
  if stalest and all[1] then
    sources[#sources + 1] = sorted_candidates(versions_of(all[1]))
  end
  sources[#sources + 1] = oldest_candidates(last) -- groups that wait in other pools, or have no version
  local at = 1
  -- bound: `most`, and PAGE.candidates_leased that stay
  while sources[at] and need.evicted < most and (need.groups > 0 or need.bytes > 0) do
    local seqs = sources[at].next(wanted(need, most))
    if #seqs > 0 then
      local used, stuck = evict_candidates(all, seqs, need)
      sources[at].pass(used, stuck)
    else
      at = at + 1
    end
  end
  add(task, 'evicted', need.evicted)
  for group, count in pairs(need.counts) do
    add(key('group', group), 'evicted', count)
  end
  return need.evicted, need.evicted == most and (need.groups > 0 or need.bytes > 0)
end
