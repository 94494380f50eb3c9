-- How many groups there are of each policy version. Writes nothing.
-- KEYS[1] stream
-- ARGV    group
-- Returns a flat list kind, version, groups, ...; kinds: w waiting, l leased, t taken (by staleness
-- when it was taken), each by o, the oldest, or n, the newest token; of those taken also the share of
-- o that came in flight, f, and in the queue, q.
--@include task facts index pending

local group, found = ARGV[1], {}
local function tell(kind, version, count)
  found[#found + 1], found[#found + 2], found[#found + 3] = kind, version, count
end

-- distinct scores of a sorted set, one look each
local function tell_scores(kind, name)
  local after = '-inf'
  while after do
    local version = redis.call('ZRANGEBYSCORE', name, after, '(inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
    if version then
      tell(kind, version, redis.call('ZCOUNT', name, version, version))
    end
    after = version and '(' .. version
  end
end

if not exists() or not rules().indexed then
  return found
end
for _, status in ipairs(STATUSES) do
  local pool = pool_of(group, status)
  if rules().order == 'stalest' or rules().max_staleness then
    tell_scores('wo', versions_of(pool))
  end
  tell_scores('wn', key('newest', pool))
end
if redis.call('SISMEMBER', key('groups'), group) == 1 then
  each_leased(group, nil, function(seq)
    local facts = facts_of(member_of(seq))
    if facts and facts.version then
      tell('lo', facts.version, 1)
    end
    if facts and facts.newest then
      tell('ln', facts.newest, 1)
    end
  end)
end
local taken = redis.call('HGETALL', key('staleness', group))
for i = 1, #taken, 2 do
  tell('t' .. string.sub(taken[i], 1, 1), string.sub(taken[i], 2), tonumber(taken[i + 1]))
end
return found
