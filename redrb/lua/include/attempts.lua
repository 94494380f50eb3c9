-- Attempts of ranks to form the next step: who asks, who was lost, how they end.
--@include task index ranks

-- Ranks that do not ask in an attempt yet.
local function missing_in(group, attempt)
  local asks, missing = {}, {}
  for _, rank in ipairs(redis.call('ZRANGEBYSCORE', key('asks', group), attempt, attempt)) do
    asks[tonumber(rank)] = true
  end
  for rank = 0, number(key('crew', group), 'world') - 1 do
    if not asks[rank] then
      missing[#missing + 1] = rank
    end
  end
  return missing
end

local function forget_ranks(group, ranks)
  for _, rank in ipairs(ranks) do
    redis.call('HDEL', key('crew', group), 'holder:' .. rank)
    redis.call('ZREM', key('asks', group), rank)
  end
end

-- Ranks that were lost before this one asked, and are not back: it is to be told too, once.
local function lost_before(group, rank)
  local crew, lost = key('crew', group), {}
  local told = numbers(crew, 'losses', 'told:' .. rank)
  if told[1] > told[2] then
    redis.call('HSET', crew, 'told:' .. rank, told[1])
    for _, other in ipairs(words(redis.call('HGET', crew, 'gone') or '')) do
      if redis.call('HEXISTS', crew, 'holder:' .. other) == 0 then
        lost[#lost + 1] = other
      end
    end
  end
  return lost
end

-- The attempt to form the next step ends, the same way for all who asked.
local function end_attempt(group, why, told, ranks)
  local crew = key('crew', group)
  local state = numbers(crew, 'attempt', 'formed')
  redis.call('HDEL', crew, 'former')
  redis.call('HSET', crew, 'ended', string.format('%.0f', state[1]), 'why', why, 'told', told,
    'lost', table.concat(ranks, ' '), 'attempt', string.format('%.0f', state[1] + 1))
  empty_slot(group, slot_of(state[2] + 1))
  wake_ranks(group)
end
