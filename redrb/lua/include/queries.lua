-- Takes with a query: each waits in a queue of its own pool and query.
--
-- The hash queries:<pool> counts, by query, the waiting groups that match it: those found when the take
-- began to wait, and those that entered the pool since. A take that is woken counts anew, so the number may
-- be too large but not too small.
--@include task


-- Name of the queue of takes with a query.
local function queue_of(pool, where)
  return where == '' and pool or pool .. '?' .. redis.sha1hex(where)
end

-- Queries that takes of a pool wait with: a flat list query, matches, ...
local function queries_of(pool)
  local queries = key('queries', pool)
  if redis.call('HLEN', queries) <= PAGE.queries then
    return redis.call('HGETALL', queries) -- bound: PAGE.queries
  end
  return redis.call('HRANDFIELD', queries, PAGE.queries, 'WITHVALUES')
end
