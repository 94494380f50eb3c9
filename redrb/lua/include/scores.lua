-- Scores of the built-in orders, for groups that have the score of a former order of the task.

local KNOWN_ORDERS = {fifo = 1, lifo = 1, stalest = 1, freshest = 1, priority = 1, uniform = 1}

-- Whether scripts can compute the scores of an order.
local function scores_known(order)
  return KNOWN_ORDERS[order] or string.match(order, '^prioritized%([0-9.e+-]+%)$')
end

-- The score that a built-in order gives a group, as in redrb/stream/orders; nil for its position of arrival.
-- The score that an order of the user gave stays: its groups get new places, never scores of another order.
local function score_by(order, facts)
  if order == 'lifo' then
    return '-arrival'
  elseif order == 'stalest' then
    return facts.version or math.huge
  elseif order == 'freshest' then
    return facts.version and -facts.version or math.huge
  elseif order == 'priority' then
    return -(facts.priority or 0)
  elseif order == 'uniform' then
    return 1
  elseif order ~= 'fifo' then
    local alpha = tonumber(string.match(order, '^prioritized%((.*)%)$'))
    return alpha and math.min(math.max(facts.priority or 1, 0) ^ alpha, 1e100) or facts.score
  end
end
