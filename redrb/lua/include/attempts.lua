-- Attempts of ranks to form the next step: which ranks ask, which were lost, how an attempt ends.
--@include task ranks

-- Ranks that have not asked for their part in an attempt yet.
local function missing_in(group, attempt)
  local asked, missing = {}, {}
  for _, rank in ipairs(redis.call('ZRANGEBYSCORE', key('rank_requests', group), attempt, attempt)) do
    asked[tonumber(rank)] = true
  end
  for rank = 0, check_ranks(group)[1] - 1 do -- bound: ranks, 4,096 at most (MOST_RANKS)
    if not asked[rank] then
      missing[#missing + 1] = rank
    end
  end
  return missing
end

local function forget_ranks(group, ranks)
  for _, rank in ipairs(ranks) do
    redis.call('HDEL', key('ranks', group), 'holder:' .. rank)
    redis.call('ZREM', key('rank_requests', group), rank)
  end
end

-- Ranks that were lost since this rank last asked, and have not come back. A rank learns of each loss
-- once.
local function lost_before(group, rank)
  local ranks, lost = key('ranks', group), {}
  local losses = numbers(ranks, 'losses', 'seen:' .. rank)
  if losses[1] > losses[2] then
    redis.call('HSET', ranks, 'seen:' .. rank, losses[1])
    for _, other in ipairs(words(redis.call('HGET', ranks, 'lost') or '')) do
      if redis.call('HEXISTS', ranks, 'holder:' .. other) == 0 then
        lost[#lost + 1] = other
      end
    end
  end
  return lost
end

-- End the attempt to form the next step, with the same reply for all ranks that asked. `last_look`: what the
-- last take found, if there was one.
local function end_attempt(group, reason, missing, last_look)
  local ranks = key('ranks', group)
  local state = numbers(ranks, 'attempt', 'formed')
  redis.call('HDEL', ranks, 'forming', 'last_look')
  redis.call('HSET', ranks, 'ended', string.format('%.0f', state[1]), 'reason', reason,
    'missing', table.concat(missing, ' '), 'attempt', string.format('%.0f', state[1] + 1))
  if last_look then
    redis.call('HSET', ranks, 'last_look', cmsgpack.pack(last_look))
  end
  empty_slot(group, slot_of(state[2] + 1))
  wake_ranks(group)
end
