-- Count the groups of each policy version. Writes nothing.
-- KEYS[1] stream
-- ARGV    group
-- Returns a flat list kind, version, groups, ...
--         kind: w waiting, l leased or t taken (then `version` is the staleness when it was taken), followed
--         by o, the version of the oldest token, or n, of the newest; for taken groups also tf and tq,
--         the shares of their staleness that arose in flight and in the queue
--@include task facts pools pending

local group, found = ARGV[1], {}
local function report(kind, version, count)
  found[#found + 1], found[#found + 2], found[#found + 3] = kind, version, count
end

-- Report how many members of a sorted set have each score, with one look a score.
local function report_scores(kind, name)
  local after = '-inf'
  while after do
    local version = redis.call('ZRANGEBYSCORE', name, after, '(inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
    if version then
      report(kind, version, redis.call('ZCOUNT', name, version, version))
    end
    after = version and '(' .. version
  end
end

if not exists() then
  return found
end
for _, status in ipairs(STATUSES) do
  local pool = pool_of(group, status)
  if rules().order == 'stalest' or rules().max_staleness then
    report_scores('wo', versions_of(pool))
  end
  report_scores('wn', key('newest', pool))
end
if redis.call('SISMEMBER', key('groups'), group) == 1 then
  each_leased(group, nil, function(seq)
    local facts = facts_of(member_of(seq))
    if facts and facts.version then
      report('lo', facts.version, 1)
    end
    if facts and facts.newest then
      report('ln', facts.newest, 1)
    end
  end)
end
local taken = redis.call('HGETALL', key('staleness', group))
for i = 1, #taken, 2 do
  report('t' .. string.sub(taken[i], 1, 1), string.sub(taken[i], 2), tonumber(taken[i + 1]))
end
return found
