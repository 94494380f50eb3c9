-- Random orders: the place by which a waiting group is drawn, from its weight; sums of weights.
--
-- A place is a floating-point number, so places near a large clock have no room between them for groups of a
-- large weight: those would share a place, and always be drawn in the same order.
--@include task facts settings

local MOST_CROWDED = 2 ^ 32 -- of a clock in mean distances, 1 / weight, of the groups that come after it

-- Forget clocks and sums, and let all groups that are stored get new places (include/sorting.lua).
local function restart_places()
  for _, group in ipairs(groups()) do
    redis.call('UNLINK', key('clock', group))
    for _, status in ipairs(STATUSES) do
      redis.call('UNLINK', key('mass', pool_of(group, status)))
    end
  end
  if redis.call('HGET', task, 'sampled') == '1' and redis.call('XLEN', stream) > 0 then
    redis.call('HSET', task, 'unsorted', '0 ' .. string.format('%.0f', number(puts, 'last')))
  else
    redis.call('HDEL', task, 'unsorted')
  end
  pack_rules()
  known_rules = nil
end

-- Restart if there is no room after a clock for one of the groups that are to be placed. Returns whether it
-- did.
local function restart_if_crowded(all, clock)
  for _, facts in ipairs(all) do
    if facts and facts.score * clock > MOST_CROWDED then
      restart_places()
      return true
    end
  end
  return false
end

-- Add the weights of groups to the sum of their pool, or subtract them. mass:<pool> holds a sum for each
-- binary exponent, in units of its 2 ^ -37: whole numbers, so nothing drifts, and a small weight is not lost
-- beside a large one. Groups that are not sorted into the order yet are not in the sum.
local function weigh(pool, members, all, sign)
  local sums, rule = {}, rules()
  for i, facts in ipairs(all) do
    local seq = rule.unsorted and tonumber(members[i])
    if facts and facts.score > 0 and not (seq and seq > rule.sorted and seq <= rule.unsorted) then
      local mantissa, exponent = math.frexp(facts.score)
      sums[exponent] = (sums[exponent] or 0) + math.floor(mantissa * 2 ^ 37 + 0.5)
    end
  end
  for exponent, units in pairs(sums) do
    if redis.call('HINCRBY', key('mass', pool), exponent, string.format('%.0f', sign * units)) == 0 then
      redis.call('HDEL', key('mass', pool), exponent)
    end
  end
end

-- The sum of the weights of the groups that wait in a pool.
local function mass_of(pool)
  local sums, total = redis.call('HGETALL', key('mass', pool)), 0 -- bound: exponents, 2,100
  for i = 1, #sums, 2 do -- bound: exponents
    total = total + math.ldexp(tonumber(sums[i + 1]), tonumber(sums[i]) - 37)
  end
  return total
end
