-- Ranks: processes that take the same steps together, each a part of every batch.
--
-- crew:<group> is there while they do. It holds world (how many ranks), first (the first step that
-- not all have acknowledged), formed (the newest one that has parts), attempt (number of the try to
-- form the next; it counts up when one ends or succeeds), spec (what is asked for in which attempt),
-- former (who forms the step, until when), how the last attempt ended (ended, why, told, lost), how
-- often ranks were lost (losses) and which last (gone), and of each rank holder:<rank>, the consumer
-- that it is, and told:<rank>, the losses it knows. asks:<group> sorts the ranks by the attempt in
-- which they ask. parts:<group> holds of each formed step <step>, what was asked for, and of each part
-- <step>.<rank> (its seqs), and with that name :given (the consumer that has it), :acked (samples),
-- :weights (of an order that draws). A part is leased to the slot ranks/<step>.<rank>, a batch that has
-- no parts yet to ranks/<step>. Their consumer, `ranks`, never dies: a crew that starts again finds the
-- same parts.
--@include task leases

local CREW = 'ranks'

local function words(text)
  local found = {}
  for word in string.gmatch(text, '%S+') do
    found[#found + 1] = word
  end
  return found
end

local function slot_of(step, rank)
  return rank and string.format('%s/%.0f.%.0f', CREW, step, rank) or string.format('%s/%.0f', CREW, step)
end

local function part_of(step, rank)
  return string.format('%.0f.%.0f', step, rank)
end

-- The consumer that each rank is, false where there is none.
local function holders_of(group)
  local names = {}
  for rank = 0, number(key('crew', group), 'world') - 1 do
    names[rank + 1] = 'holder:' .. rank
  end
  return #names > 0 and redis.call('HMGET', key('crew', group), unpack(names)) or {}
end

-- Ranks of which another process than `me` lives, and those of which it does not.
local function look_round(group, me, now)
  local ranks, holders, living, dead = {}, {}, {}, {}
  for i, holder in ipairs(holders_of(group)) do
    if holder and holder ~= me then
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

local function wake_ranks(group)
  for _, holder in ipairs(holders_of(group)) do
    if holder then
      local list = key('wake', holder .. '.rank')
      redis.call('DEL', list)
      redis.call('RPUSH', list, '1')
      redis.call('PEXPIRE', list, 10000)
    end
  end
end

-- What a slot of the crew holds goes back, unharmed; the slot ends.
local function empty_slot(group, slot)
  local returned = return_slot(group, slot, false, CREW)
  redis.call('HDEL', key('leases', group), slot)
  redis.call('XGROUP', 'DELCONSUMER', stream, group, slot)
  return returned
end

-- The crew ends, and what it holds goes back unharmed.
local function dissolve(group)
  return_leases(group, CREW, false)
  redis.call('DEL', key('crew', group), key('parts', group), key('asks', group))
end

-- Whether ranks take from a consumer group, so that nobody else may. A crew of which no process lives
-- ends here, as the leases of any dead consumer do.
local function is_manned(group, slot, now)
  if redis.call('EXISTS', key('crew', group)) == 0 or string.sub(slot, 1, #CREW + 1) == CREW .. '/' then
    return false
  elseif #look_round(group, '', now) > 0 then
    return true
  end
  dissolve(group)
  return false
end
