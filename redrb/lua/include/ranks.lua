-- Ranks: processes that take the same steps together, each a part of every batch.
--
-- The hash ranks:<group> exists while they do:
--   world           number of ranks
--   first, formed   first step that not all ranks have acknowledged, newest step that has parts
--   attempt         number of the attempt to form the next step; counts up when one ends or succeeds
--   spec            "<attempt> <request>": the request of the ranks in that attempt
--   forming         "<rank> <deadline>": the rank that forms the step
--   ended, reason, missing, last_look
--                   the last attempt that ended: its number, why, ranks missing, and a record: what the
--                   last take found
--   losses, lost    how often ranks were lost, and which ranks the last time
--   holder:<rank>   consumer that is the rank
--   seen:<rank>     losses that the rank has learnt of
-- The sorted set rank_requests:<group> holds the ranks by the attempt in which they ask.
-- The hash rank_parts:<group> holds of each formed step <step>, its request, and of each part
--   <step>.<rank>   its seqs
--   ...:given       consumer that has the part
--   ...:acked       its samples, once acknowledged
--   ...:weights     its weights, if the order draws: a record
--
-- A part is leased to the slot ranks/<step>.<rank>, a batch that is not dealt yet to ranks/<step>. The
-- consumer of these slots, `ranks`, never dies: ranks that start again find the same parts.
--@include task leases takeover waiters

local function words(text)
  local found = {}
  for word in string.gmatch(text, '%S+') do
    found[#found + 1] = word
  end
  return found
end

local function slot_of(step, rank)
  return rank and string.format('%s/%.0f.%.0f', RANKS, step, rank) or string.format('%s/%.0f', RANKS, step)
end

local function part_of(step, rank)
  return string.format('%.0f.%.0f', step, rank)
end

-- Refuse damaged numbers of ranks and steps, which loops would count through.
local function check_ranks(group)
  local state = numbers(key('ranks', group), 'world', 'first', 'formed')
  if state[1] > 4096 or state[3] - state[2] > 4096 then
    error({err = 'ERR the number of ranks or steps in ' .. key('ranks', group) .. ' is damaged'})
  end
  return state
end

-- The consumer of each rank, false if there is none.
local function holders_of(group)
  local names = {}
  for rank = 0, check_ranks(group)[1] - 1 do -- bound: ranks, 4,096 at most (MOST_RANKS)
    names[rank + 1] = 'holder:' .. rank
  end
  return #names > 0 and redis.call('HMGET', key('ranks', group), unpack(names)) or {}
end

-- Ranks whose consumer lives, and ranks whose consumer is dead; `except` is left out.
local function living_ranks(group, except, now)
  local ranks, holders, living, dead = {}, {}, {}, {}
  for i, holder in ipairs(holders_of(group)) do
    if holder and holder ~= except then
      ranks[#ranks + 1], holders[#holders + 1] = i - 1, holder
    end
  end
  if #holders > 0 then
    for i, deadline in ipairs(redis.call('ZMSCORE', key('consumers', group), unpack(holders))) do
      table.insert(deadline and tonumber(deadline) > now and living or dead, ranks[i])
    end
  end
  return living, dead
end

-- Whether a take for a whole step comes too late: the step has parts, its attempt is over, or there are no
-- ranks. Nobody would deal the batch that it leases.
local function is_late_batch(group, slot, attempt)
  if string.sub(slot, 1, #RANKS + 1) ~= RANKS .. '/' then
    return false
  end
  local state = numbers(key('ranks', group), 'attempt', 'formed')
  return attempt ~= string.format('%.0f', state[1]) or slot ~= slot_of(state[2] + 1)
end

local function wake_ranks(group)
  for _, holder in ipairs(holders_of(group)) do
    if holder then
      redis.call('DEL', key('wake', holder .. '.rank'))
      send_wake(holder .. '.rank')
    end
  end
end

-- Requeue the groups that a slot of the ranks leases; heartbeats go on after a page of them.
local function empty_slot(group, slot)
  local _, emptied = return_slot(group, slot, false, PAGE.taken_over)
  if emptied then
    remove_slot(group, slot)
  end
end

-- End the ranks of a consumer group. Heartbeats requeue the groups that they lease, as those of a dead
-- consumer; these deliveries have not failed.
local function end_ranks(group)
  redis.call('UNLINK', key('ranks', group), key('rank_parts', group), key('rank_requests', group))
  redis.call('ZADD', key('consumers', group), 0, RANKS)
  return_leases(group, RANKS, false, PAGE.taken_over)
end

-- Whether ranks take from a consumer group, so that other consumers may not. Ranks that are all dead end
-- here, as the leases of any dead consumer do.
local function has_ranks(group, slot, now)
  if redis.call('EXISTS', key('ranks', group)) == 0 or string.sub(slot, 1, #RANKS + 1) == RANKS .. '/' then
    return false
  elseif #living_ranks(group, '', now) > 0 then
    return true
  end
  end_ranks(group)
  return false
end

-- The outcome of a take that ranks exclude, and of a late one of theirs; or nil. `leased`: what the slot
-- held.
local function refused_by_ranks(group, slot, token, leased, now)
  if has_ranks(group, slot, now) then
    return 'ranks'
  elseif not is_late_batch(group, slot, token) then
    return nil
  elseif not leased then
    remove_slot(group, slot)
  end
  return 'late'
end
