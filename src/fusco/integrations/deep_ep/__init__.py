"""DeepEP's classes on fusco: three interfaces, thin over one implementation.

=====================  ==================================  ========================================
class                  its calls are those of              rows arrive
=====================  ==================================  ========================================
``Buffer``             version 1                           by source rank, one for each rank
``EPBuffer``           2.5; 2.1 names it ``ElasticBuffer``  as version 1, or by local expert
``HybridEPBuffer``     the branch hybrid-ep                by local expert, or as version 1
=====================  ==================================  ========================================

``base`` has what all of them do: a call's handle, its events, its sums, what is refused. Rows by source rank come from
``rank_rows``, rows by expert from ``fusco.integrations.expert_rows``, which adapters of frameworks use, too. Programs
import all of this as ``deep_ep``, see ``fusco.integrations``.
"""
