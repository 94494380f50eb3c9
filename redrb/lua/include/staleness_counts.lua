-- Counts waiting and leased groups by staleness, with work that does not depend on their number.
--@include task facts pools

local MOST_EXACT = 16 -- a larger staleness is counted in ranges
local RANGES = {{17, 32, 24}, {33, '+', 33}} -- first, last, and the staleness that stands for it
local MOST_READ = 32 -- groups at each end of a pool that is not sorted by version, and leased groups

-- Counts as they are reported: {sampled, unknown, staleness, groups, ...}.
local function counted(sampled, unknown, counts)
  local found = {sampled and 1 or 0, unknown}
  for stale, number_of in pairs(counts) do
    if number_of > 0 then
      found[#found + 1], found[#found + 2] = stale, number_of
    end
  end
  return found
end

-- Counts of groups by the facts that were read.
local function of_facts(members, sampled)
  local version, counts, unknown = rules().version, {}, 0
  for _, facts in ipairs(facts_of_all(members)) do
    if facts and facts.version and version then
      local stale = math.max(0, version - facts.version)
      counts[stale] = (counts[stale] or 0) + 1
    else
      unknown = unknown + 1
    end
  end
  return counted(sampled, unknown, counts)
end

-- The completed groups that wait for a consumer group.
local function count_waiting(group)
  local pool, version = pool_of(group, 'completed'), rules().version
  local ready = key('ready', pool)
  local total = redis.call('ZCARD', ready)
  if not version then
    return {0, total}
  elseif not (sorts_by_version() or indexes_versions()) then
    local sampled = total > 2 * MOST_READ
    local members = redis.call('ZRANGE', ready, 0, sampled and MOST_READ - 1 or -1)
    if sampled then
      for _, member in ipairs(redis.call('ZRANGE', ready, -MOST_READ, -1)) do
        members[#members + 1] = member
      end
    end
    return of_facts(members, sampled)
  end
  local counts, known = {}, 0
  local function count(stale, from, to)
    local number_of = redis.call('ZCOUNT', versions_of(pool), from, to)
    counts[stale], known = number_of, known + number_of
  end
  count(0, string.format('%.0f', version), '+inf')
  for stale = 1, MOST_EXACT do
    local at = string.format('%.0f', version - stale)
    count(stale, at, at)
  end
  for _, range in ipairs(RANGES) do
    local from = range[2] == '+' and '-inf' or string.format('%.0f', version - range[2])
    count(range[3], from, string.format('%.0f', version - range[1]))
  end
  return counted(false, math.max(0, total - known), counts)
end

-- The groups that a consumer group leases.
local function count_leased_staleness(group)
  local members = {}
  if redis.call('EXISTS', stream) == 0 or redis.call('SISMEMBER', key('groups'), group) == 0 then
    return {0, 0}
  end
  local pending = redis.call('XPENDING', stream, group, '-', '+', 2 * MOST_READ)
  for i, entry in ipairs(pending) do
    members[i] = member_of(seq_of(entry[1]))
  end
  return of_facts(members, #members == 2 * MOST_READ)
end
