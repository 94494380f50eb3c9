-- Says where an entry stands in each consumer group, and lets it go when all are done with it.
--
-- In a consumer group an entry is waiting (in one of its pools), leased (in the pending list) or done.
-- When it is done in all groups it is deleted or becomes history.
--@include task facts pools history

local function is_leased(group, seq)
  local id = id_of(seq)
  return #redis.call('XPENDING', stream, group, id, id, 1) > 0
end

-- Whether a slot leases an entry. In a repeated call, the entry may be another slot's by now.
local function holds(group, slot, seq)
  return #redis.call('XPENDING', stream, group, id_of(seq), id_of(seq), 1, slot) > 0
end

-- The pool in which an entry waits, or nil.
local function waits_in(group, seq)
  local member = member_of(seq)
  local facts = facts_of(member)
  local pool = facts and home_of(group, member, facts) or group
  return redis.call('ZSCORE', key('ready', pool), member) and pool or nil
end

-- Count the reads that entries will never have because they end early: a rate does not wait for them.
-- `leased`: the entries are being read, which counts as one read each. Returns how many they are.
local function left_unread(group, seqs, leased)
  local most = rules().max_reads
  if most == 0 or #seqs == 0 then
    return 0
  end
  local left = (most - (leased and 1 or 0)) * #seqs
  if most > 1 and redis.call('EXISTS', key('reads', group)) == 1 then
    for _, seq in ipairs(seqs) do
      left = left - number(key('reads', group), member_of(seq))
    end
  end
  add(key('group', group), 'unread', left)
  return left
end

-- Allow evictions by arrival to evict an entry that they have gone past, as it was leased or history. The
-- score of a dead letter that was requeued in fifo is its old arrival.
local function let_evict(seq, facts)
  local arrival = facts and rules().order == 'fifo' and facts.score
  if arrival or tonumber(seq) < number(task, 'floor') then
    redis.call('ZADD', key('behind'), arrival or seq, member_of(seq))
  end
end

local function needed_by(group, seq)
  return waits_in(group, seq) or is_leased(group, seq)
end

-- Those of the entries, which are done in a consumer group, that no other consumer group needs.
local function needed_by_none(group, seqs)
  local all, over = groups(), {}
  if #all == 1 and all[1] == group then
    return seqs
  end
  for _, seq in ipairs(seqs) do
    local needed = false
    for _, other in ipairs(all) do
      needed = needed or (other ~= group and needed_by(other, seq))
    end
    if not needed then
      over[#over + 1] = seq
    else
      let_evict(seq)
    end
  end
  return over
end

-- Delete entries that no consumer group needs. If the task keeps history, those that any group has
-- acknowledged become history instead; `acked`: the last group has. Returns the number of entries deleted.
local function let_go(over, acked)
  if not rules().keeps then
    return delete(over)
  elseif acked then
    return retire(over)
  end
  local read, gone = {}, {}
  for _, seq in ipairs(over) do
    local facts = facts_of(member_of(seq))
    local target = facts and facts.reads and read or gone
    target[#target + 1] = seq
  end
  return delete(gone) + retire(read)
end

-- Entries are done in a consumer group: delete the group's notes on them, and let the entries go that no
-- other group needs. `acked`: this group has acknowledged them. Returns the number of entries deleted.
local function forget(group, seqs, acked)
  if redis.call('EXISTS', key('moved', group), key('expiries', group), key('reads', group)) > 0 then
    for _, seq in ipairs(seqs) do
      redis.call('HDEL', key('moved', group), member_of(seq))
      redis.call('HDEL', key('expiries', group), member_of(seq))
      redis.call('HDEL', key('reads', group), member_of(seq))
    end
  end
  local over = needed_by_none(group, seqs)
  if not (acked and rules().groups_per_version) then
    return let_go(over, acked)
  end
  --@include capacity
  local stored = stored_groups()
  local deleted = let_go(over, acked)
  add(key('admission'), 'trained', stored - stored_groups())
  return deleted
end
