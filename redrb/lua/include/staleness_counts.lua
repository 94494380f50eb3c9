-- Counts waiting groups by staleness, and reads versions of groups, with work that does not depend on their
-- number. Each function returns `StalenessCounts` of redrb/watch/state/calls.py.
--@include task facts pools

local MOST_EXACT = 32 -- a larger staleness counts as the next one

-- The versions of some groups, of `total`.
local function versions_among(total, members)
  local versions = {}
  for _, packed in ipairs(#members > 0 and redis.call('HMGET', key('facts'), unpack(members)) or {}) do
    local whole, facts = pcall(cmsgpack.unpack, packed or '')
    if whole and type(facts) == 'table' and type(facts.version) == 'number' then
      versions[#versions + 1] = facts.version
    end
  end
  return {groups = total, read = #members, versions = versions}
end

-- Count the groups of a pool that is sorted by version: one look for each staleness, up to that of the oldest
-- group.
local function count_by_version(pool, total)
  local name, version = versions_of(pool), rules().version
  local oldest = redis.call('ZRANGEBYSCORE', name, '-inf', '(inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  if not oldest then
    return {groups = total}
  end
  local left, largest, stale = redis.call('ZCOUNT', name, '-inf', '(inf'), version - tonumber(oldest), 0
  local ages = {}
  while left > 0 do -- bound: MOST_EXACT + 2 looks
    local number_of = left
    if stale < largest and stale <= MOST_EXACT then
      local from = string.format('%.0f', version - stale)
      number_of = redis.call('ZCOUNT', name, from, stale == 0 and '(inf' or from)
    end
    if number_of > 0 then
      ages[#ages + 1] = {stale, number_of}
    end
    left, stale = left - number_of, stale + 1
  end
  return {groups = total, ages = ages, oldest = oldest}
end

-- The completed groups that wait for a consumer group: exact counts, or the versions of `most` groups, the
-- first and last of the queue.
local function count_waiting(group, most)
  local pool = pool_of(group, 'completed')
  local ready = key('ready', pool)
  local total = redis.call('ZCARD', ready)
  if total == 0 or not rules().version then
    return {groups = total}
  elseif sorts_by_version() or indexes_versions() then
    return count_by_version(pool, total)
  end
  local half = math.ceil(most / 2)
  local members = redis.call('ZRANGE', ready, 0, total <= most and -1 or half - 1)
  if total > most then
    -- bound: `most`, PAGE.observed_groups
    for _, member in ipairs(redis.call('ZRANGE', ready, half - most, -1)) do
      members[#members + 1] = member
    end
  end
  return versions_among(total, members)
end

-- The groups that a consumer group leases: the versions of `most` of them.
local function read_leased(group, leased, most)
  local members = {}
  local pending = leased > 0 and rules().version
    and redis.call('XPENDING', stream, group, '-', '+', most) or {}
  for i, entry in ipairs(pending) do
    members[i] = member_of(seq_of(entry[1]))
  end
  return versions_among(leased, members)
end
