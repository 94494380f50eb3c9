-- Heartbeats of consumers: consumers:<group> holds the deadline of each.
--@include task

-- Renew a consumer's deadline. Returns its old deadline, if it had one, and the first consumers whose
-- deadline is over, with their deadlines.
local function renew(group, consumer, lease_ms, now)
  local consumers = key('consumers', group)
  local deadline = redis.call('ZSCORE', consumers, consumer)
  redis.call('ZADD', consumers, string.format('%d', now + lease_ms), consumer)
  return deadline, redis.call('ZRANGEBYSCORE', consumers, '-inf', now, 'WITHSCORES', 'LIMIT', 0,
    PAGE.dead_consumers)
end
