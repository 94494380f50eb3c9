-- Says where an entry stands in each consumer group, and lets it go when all are done with it.
--
-- In a consumer group an entry is waiting (in one of its pools), leased (in the pending list) or done.
-- When it is done in all groups it is deleted.
--@include task facts pools pending deletion

-- The pool in which an entry waits, or nil.
local function waits_in(group, seq)
  local member = member_of(seq)
  local facts = facts_of(member)
  local pool = facts and home_of(group, member, facts) or group
  return redis.call('ZSCORE', key('ready', pool), member) and pool or nil
end

-- The pools in which entries wait for a consumer group, by their number in `members`; `all` holds their
-- facts, false where there are none.
local function pools_among(group, members, all)
  local moved, numbers_in, pools = replies_of('HMGET', key('moved', group), members), {}, {}
  for i = 1, #members do
    local pool = all[i] and pool_of(group, moved[i] or all[i].status) or group
    numbers_in[pool] = numbers_in[pool] or {}
    table.insert(numbers_in[pool], i)
  end
  for pool, found in pairs(numbers_in) do
    local there = {}
    for i, at in ipairs(found) do
      there[i] = members[at]
    end
    for i, score in ipairs(replies_of('ZMSCORE', key('ready', pool), there)) do
      pools[found[i]] = score and pool
    end
  end
  return pools
end

-- Allow evictions by arrival to evict entries that they have gone past, as they were leased.
local function let_evict(seqs)
  local floor, behind = #seqs > 0 and number(task, 'floor') or 0, {}
  for _, seq in ipairs(seqs) do
    if tonumber(seq) < floor then
      behind[#behind + 1], behind[#behind + 2] = seq, member_of(seq)
    end
  end
  in_parts('ZADD', key('behind'), behind)
end

-- Move entries that a consumer group needs, as they wait for it or it leases them, to `kept`. `entries` holds
-- lists of seqs, members and facts. Returns the other entries.
local function without_needed(group, entries, kept)
  local pools, others = pools_among(group, entries.members, entries.facts), {}
  for i, seq in ipairs(entries.seqs) do
    if not pools[i] then
      others[#others + 1] = seq
    end
  end
  local leased, rest = leased_among(group, others), {seqs = {}, members = {}, facts = {}}
  for i, seq in ipairs(entries.seqs) do
    if pools[i] or leased[tonumber(seq)] then
      kept[#kept + 1] = seq
    else
      local at = #rest.seqs + 1
      rest.seqs[at], rest.members[at], rest.facts[at] = seq, entries.members[i], entries.facts[i]
    end
  end
  return rest
end

-- Those of the entries, which are done in a consumer group, that no other consumer group needs.
local function needed_by_none(group, seqs)
  local all, members, kept = groups(), {}, {}
  if #all == 1 and all[1] == group then
    return seqs
  end
  for i, seq in ipairs(seqs) do
    members[i] = member_of(seq)
  end
  local rest = {seqs = seqs, members = members, facts = facts_of_all(members)}
  for _, other in ipairs(all) do
    if other ~= group and #rest.seqs > 0 then
      rest = without_needed(other, rest, kept)
    end
  end
  let_evict(kept)
  return rest.seqs
end

-- Entries are done in a consumer group: delete the group's notes on them, and let the entries go that no
-- other group needs. `acked`: this group has acknowledged them. Returns the number of entries deleted.
local function forget(group, seqs, acked)
  local notes, members = {}, {}
  for i, kind in ipairs(TASK_KEYS.notes) do
    notes[i] = key(kind, group)
  end
  if redis.call('EXISTS', unpack(notes)) > 0 then
    for i, seq in ipairs(seqs) do
      members[i] = member_of(seq)
    end
    for _, name in ipairs(notes) do
      in_parts('HDEL', name, members)
    end
  end
  local deleted = delete(needed_by_none(group, seqs))
  if acked and rules().groups_per_version then
    add(key('admission'), 'trained', deleted)
  end
  return deleted
end
