-- Count the groups of each policy version. Writes nothing.
-- KEYS[1] stream
-- ARGV    the call `Versions` of redrb/stream/task/calls.py
-- Returns its reply
--@include task facts pools pending

local ask, counts, looks = cmsgpack.unpack(ARGV[1]), {}, 0
local group = ask.group
local phase, at, after = string.match(ask.place, '^(%a) (%d+) (%S+)$')
local joined = redis.call('SISMEMBER', key('groups'), group) == 1
local indexed = rules().order == 'stalest' or rules().max_staleness
local function report(kind, version, count)
  counts[#counts + 1] = {kind, version, count}
end

-- Report how many members of a sorted set have each score beyond `low`, with one look a score. Returns
-- the score to go on from, nil at the end.
local function report_scores(kind, name, low)
  while low do -- bound: PAGE.counted_versions
    if looks == PAGE.counted_versions then
      return low
    end
    local version = redis.call('ZRANGEBYSCORE', name, low, '(inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
    if version then
      report(kind, version, redis.call('ZCOUNT', name, version, version))
      looks = looks + 1
    end
    low = version and '(' .. version
  end
end

-- Report a page of the groups that wait, by their facts: where no index has their versions, or the
-- consumer group has not joined and would find all groups.
local function report_by_facts()
  local page = redis.call('HSCAN', key('facts'), at or '0', 'COUNT', PAGE.counted_versions)
  for i = 1, #page[2], 2 do
    local member, facts = page[2][i], unpack_facts(page[2][i + 1])
    local waits = not joined or redis.call('ZSCORE', key('ready', home_of(group, member, facts)), member)
    if waits and facts.version then
      report('wo', facts.version, 1)
    end
    if waits and facts.newest and not joined then
      report('wn', facts.newest, 1)
    end
  end
  return page[1] == '0' and 'w 1 -inf' or 'f ' .. page[1] .. ' -'
end

local function report_waiting()
  local sources = {}
  for _, status in ipairs(STATUSES) do
    local pool = pool_of(group, status)
    if indexed then
      sources[#sources + 1] = {'wo', versions_of(pool)}
    end
    sources[#sources + 1] = {'wn', key('newest', pool)}
  end
  for i = tonumber(at or '1'), #sources do
    local rest = report_scores(sources[i][1], sources[i][2], after or '-inf')
    if rest then
      return string.format('w %d %s', i, rest)
    end
    after = nil
  end
  return 'l 0 -'
end

local function report_leased()
  if not joined then
    return ''
  end
  local last
  each_leased(group, nil, function(seq)
    local facts = facts_of(member_of(seq))
    if facts and facts.version then
      report('lo', facts.version, 1)
    end
    if facts and facts.newest then
      report('ln', facts.newest, 1)
    end
    looks, last = looks + 1, seq
    return looks >= PAGE.counted_versions
  end, after)
  return looks >= PAGE.counted_versions and 'l 0 (' .. id_of(last) or ''
end

if not exists() then
  return cmsgpack.pack({place = '', counts = counts})
end
if not phase then
  local taken = redis.call('HGETALL', key('staleness', group)) -- bound: stalenesses, 4 * (MOST_STALENESS + 1)
  for i = 1, #taken, 2 do
    report('t' .. string.sub(taken[i], 1, 1), string.sub(taken[i], 2), tonumber(taken[i + 1]))
  end
end
local next_place
if phase == 'l' then
  next_place = report_leased()
elseif phase ~= 'w' and not (joined and indexed) then
  next_place = report_by_facts()
else
  next_place = report_waiting()
end
return cmsgpack.pack({place = next_place, counts = counts})
